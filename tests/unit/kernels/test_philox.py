"""Philox against its authors' published vectors, and masks against what chance allows."""

import numba
import numpy as np
import pytest
from scipy import stats

from penstock.kernels.philox import dropout_mask, philox
from penstock.kernels.vectors import first_lanes, splat, store

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


@numba.njit
def _philox_words(c0, c1, c2, c3, k0, k1, out):
    words = philox(splat(c0), splat(c1), splat(c2), splat(c3), splat(k0), splat(k1))
    store(out, 0, words[0], first_lanes(1))
    store(out, 1, words[1], first_lanes(1))
    store(out, 2, words[2], first_lanes(1))
    store(out, 3, words[3], first_lanes(1))


def words_of(counter: list[int], key: list[int]) -> np.ndarray:
    out = np.empty(4, np.uint32)
    _philox_words(*map(np.uint32, counter + key), out)
    return out


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def mask(length: int, key: int = 1, stream: int = 2, keep: float = 0.5) -> np.ndarray:
    out = np.zeros(length, np.bool_)
    dropout_mask(out, key, stream, keep)
    return out


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_equals_published_vectors(counter, key, result):
    assert words_of(numbers(counter), numbers(key)).tolist() == numbers(result)


def test_each_element_uses_the_documented_word():
    key, stream, keep = 0x0123456789ABCDEF, 0xFEDCBA9876543210, 0.3
    drawn = mask(66_000, key, stream, keep)
    for element in (0, 1, 15, 16, 63, 64, 1000, 65535, 65536, 65999):
        group, rest = divmod(element, 64)
        word, lane = divmod(rest, 16)
        counter = [16 * group + lane, 0, stream & 0xFFFFFFFF, stream >> 32]
        value = words_of(counter, [key & 0xFFFFFFFF, key >> 32])[word]
        assert drawn[element] == (value < round(keep * 2**32)), element


@pytest.mark.parametrize("length", [*range(70), 65535, 65536, 65537])
def test_longer_mask_begins_with_the_shorter(length):
    np.testing.assert_array_equal(mask(length), mask(70_000)[:length])


def test_the_number_of_threads_does_not_change_a_bit():
    results = []
    for threads in (1, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(threads)
        results.append(mask(1_000_003))
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("key", [0, 1, 2**63 + 5])
def test_kept_share_is_within_statistical_error(keep, key):
    length = 1_000_000
    kept = int(mask(length, key, 7, keep).sum())
    # A fair draw fails this once in ten million tries; the draw is fixed.
    assert stats.binomtest(kept, length, keep).pvalue > 1e-7


@pytest.mark.parametrize("key", [3, 4])
def test_bytes_of_bits_are_uniform(key):
    patterns = np.packbits(mask(2_000_000, key))
    assert stats.chisquare(np.bincount(patterns, minlength=256)).pvalue > 1e-6


def test_keys_and_streams_are_independent():
    first = mask(1_000_000, 1, 1)
    for other in (mask(1_000_000, 2, 1), mask(1_000_000, 1, 2), mask(1_000_000, 1 << 32, 1)):
        agree = int((first == other).sum())
        assert stats.binomtest(agree, first.size, 0.5).pvalue > 1e-7


def test_probabilities_zero_and_one_are_exact():
    assert mask(1000, keep=1.0).all()
    assert not mask(1000, keep=0.0).any()


def test_byte_masks_are_zeros_and_ones():
    out = np.full(100, 9, np.uint8)
    dropout_mask(out, 1, 2, 0.5)
    np.testing.assert_array_equal(out, mask(100))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 0.5), "key: expected 0 to 2^64 - 1, got -1"),
        ((0, 2**64, 0.5), "stream: expected 0 to 2^64 - 1, got 18446744073709551616"),
        ((0, 0, 1.5), "keep_probability: expected 0 to 1, got 1.5"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match="expected") as caught:
        dropout_mask(np.zeros(3, np.bool_), *arguments)
    assert str(caught.value) == message
