"""Selections, histograms and mask changes survive their encoding; damaged ones are refused."""

import numpy as np
import pytest

from penstock.distributed.rpc import (
    bytes_of_histograms,
    bytes_of_masks,
    bytes_of_open_selections,
    histograms_of,
    masks_of_payload,
    open_selections_of,
)
from penstock.distributed.rpc.mask_codec import MOST_HISTOGRAM_BYTES
from penstock.errors import ProtocolError
from penstock.sparsity import Histogram, MaskChange, Order, begin_selection, select_all
from penstock.store import Decision, OpenSelection

SELECTIONS = [
    OpenSelection("a.weight", "drop", begin_selection(Order.SMALLEST, 2**64 - 1, 12)),
    OpenSelection("b", "grow", begin_selection(Order.RANDOM, 5, 1)),
]
HISTOGRAMS = [
    Histogram(np.array([0, 7, 65535], np.uint16), np.array([1, 2**40, 3], np.int64)),
    Histogram(np.empty(0, np.uint16), np.empty(0, np.int64)),
]


def payload(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def test_open_selections_and_changes_are_those_that_were_sent():
    assert open_selections_of(bytes_of_open_selections(SELECTIONS)) == SELECTIONS
    nothing = begin_selection(Order.SMALLEST, 3, 0)
    change = MaskChange("a.weight", 10, nothing, select_all(4))
    decision = Decision(3, 1.0, 1.0, 0.1, (change,), replaces_update=True)
    assert masks_of_payload(bytes_of_masks(decision)) == ((change,), True)
    assert bytes_of_masks(Decision(3, 1.0, 1.0, 0.1)) is None
    assert masks_of_payload(None) == ((), False)


def test_histograms_are_those_that_were_sent():
    for sent, came in zip(
        HISTOGRAMS, histograms_of(bytes_of_histograms(HISTOGRAMS), [2**40 + 4, 0]), strict=True
    ):
        np.testing.assert_array_equal(came.digits, sent.digits)
        np.testing.assert_array_equal(came.counts, sent.counts)


@pytest.mark.parametrize("cut", [0, 1, 5, 20, -1])
def test_damaged_histograms_are_refused(cut):
    data = bytes_of_histograms(HISTOGRAMS)
    with pytest.raises(ProtocolError, match="expected histograms, got invalid bytes"):
        histograms_of(data[:cut], [2**41, 0])
    with pytest.raises(ProtocolError, match="bytes follow the last histogram"):
        histograms_of(data, [2**41])
    falling = Histogram(np.array([7, 3], np.uint16), np.array([1, 1], np.int64))
    with pytest.raises(ProtocolError, match="digits do not rise"):
        histograms_of(bytes_of_histograms([falling]), [100])


@pytest.mark.parametrize("counts", [[5, 6], [11, 1], [2**62, 2**62], [2**63 - 1, 2**63 - 1]])
def test_histogram_of_more_entries_than_elements_is_refused(counts):
    found = Histogram(np.array([3, 7], np.uint16), np.array(counts, np.int64))
    with pytest.raises(ProtocolError, match="counts more than the 10 elements"):
        histograms_of(bytes_of_histograms([found]), [10])


def test_histograms_larger_than_all_digits_are_refused():
    size = MOST_HISTOGRAM_BYTES + 1
    with pytest.raises(ProtocolError, match=f"{size:,} bytes, expected at most {size - 1:,}"):
        histograms_of(np.zeros(size, np.uint8), [10])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[1]",
        b'[["a", "drop", []]]',
        b'[["a", "lift", ["random", 0, 1, 1, 2, 0, 0, false]]]',
        b'[["a", "drop", ["random", -1, 1, 1, 2, 0, 0, false]]]',
        b'[["a", "drop", ["random", 0, 1, 1, 2, 0, 0, true]]]',
        b'[[3, "drop", ["random", 0, 1, 1, 2, 0, 0, false]]]',
    ],
)
def test_damaged_open_selections_are_refused(text):
    with pytest.raises(ProtocolError, match="expected open selections, got invalid bytes"):
        open_selections_of(payload(text))


@pytest.mark.parametrize("text", [b"", b"[]", b'{"changes": [[1]], "replaces_update": true}'])
def test_damaged_changes_are_refused(text):
    with pytest.raises(ProtocolError, match="expected changes of masks, got invalid bytes"):
        masks_of_payload(payload(text))
