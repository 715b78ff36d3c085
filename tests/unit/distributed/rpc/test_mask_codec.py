"""Ballots, votes and changes of masks survive their encoding, and damaged ones are refused."""

import numpy as np
import pytest

from penstock.distributed.rpc import (
    ballots_of,
    bytes_of_ballots,
    bytes_of_masks,
    bytes_of_votes,
    masks_of_payload,
    votes_of,
)
from penstock.errors import ProtocolError
from penstock.sparsity import MaskChange, Order, Votes, begin_selection, select_all
from penstock.store import Ballot, Decision

BALLOTS = [
    Ballot("a.weight", "drop", begin_selection(Order.SMALLEST, 2**64 - 1, 12)),
    Ballot("b", "grow", begin_selection(Order.RANDOM, 5, 1)),
]
VOTES = [
    Votes(np.array([0, 7, 65535], np.uint16), np.array([1, 2**40, 3], np.int64)),
    Votes(np.empty(0, np.uint16), np.empty(0, np.int64)),
]


def payload(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def test_ballots_and_changes_are_those_that_were_sent():
    assert ballots_of(bytes_of_ballots(BALLOTS)) == BALLOTS
    nothing = begin_selection(Order.SMALLEST, 3, 0)
    change = MaskChange("a.weight", 10, nothing, select_all(4))
    decision = Decision(3, 1.0, 1.0, 0.1, (change,), replaces_update=True)
    assert masks_of_payload(bytes_of_masks(decision)) == ((change,), True)
    assert bytes_of_masks(Decision(3, 1.0, 1.0, 0.1)) is None
    assert masks_of_payload(None) == ((), False)


def test_votes_are_those_that_were_sent():
    for sent, came in zip(VOTES, votes_of(bytes_of_votes(VOTES), 2), strict=True):
        np.testing.assert_array_equal(came.digits, sent.digits)
        np.testing.assert_array_equal(came.counts, sent.counts)


@pytest.mark.parametrize("cut", [0, 1, 5, 20, -1])
def test_damaged_votes_are_refused(cut):
    data = bytes_of_votes(VOTES)
    with pytest.raises(ProtocolError, match="expected votes, got invalid bytes"):
        votes_of(data[:cut], 2)
    with pytest.raises(ProtocolError, match="bytes follow the last votes"):
        votes_of(data, 1)
    falling = Votes(np.array([7, 3], np.uint16), np.array([1, 1], np.int64))
    with pytest.raises(ProtocolError, match="digits do not rise"):
        votes_of(bytes_of_votes([falling]), 1)


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
def test_damaged_ballots_are_refused(text):
    with pytest.raises(ProtocolError, match="expected ballots, got invalid bytes"):
        ballots_of(payload(text))


@pytest.mark.parametrize("text", [b"", b"[]", b'{"changes": [[1]], "replaces_update": true}'])
def test_damaged_changes_are_refused(text):
    with pytest.raises(ProtocolError, match="expected changes of masks, got invalid bytes"):
        masks_of_payload(payload(text))
