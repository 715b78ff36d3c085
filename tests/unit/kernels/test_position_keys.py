"""Position keys against Philox's published vectors and a plain NumPy reference."""

import numpy as np
import pytest
from random_masks import philox2x32

from penstock.kernels.position_keys import position_keys

# Random123 1.14, tests/kat_vectors, "philox2x32 10": counter, key, result.
KNOWN = [
    ("00000000 00000000", "00000000", "ff1dae59 6cd10df2"),
    ("ffffffff ffffffff", "ffffffff", "2c3f628b ab4fd7ad"),
    ("243f6a88 85a308d3", "13198a2e", "dd7ce038 f62a4c12"),
]


def keys(begin: int, length: int, key: int) -> list[int]:
    out = np.empty(length, np.uint64)
    position_keys(out, begin, key)
    return out.tolist()


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_published_vectors(counter, key, result):
    low, high = (int(word, 16) for word in counter.split())
    # The high word of the key is combined with that of the position.
    whole_key = int(key, 16) | high << 32
    assert keys(low, 1, whole_key) == [int(result.replace(" ", ""), 16)]


@pytest.mark.parametrize("begin", [0, 4096, 2**32 - 2, 2**40])
@pytest.mark.parametrize("key", [0, 1, 0xFEDCBA9876543210])
def test_keys_are_those_of_the_reference(begin, key):
    assert keys(begin, 5, key) == philox2x32(np.arange(begin, begin + 5), key).tolist()


def test_no_two_positions_have_one_key():
    # High words alone repeat: 8 of 2^18 on average.
    drawn = keys(2**32 - 2**17, 2**18, 7)
    assert len(set(drawn)) == len(drawn)
    assert len({key >> 32 for key in drawn}) < len(drawn)


@pytest.mark.parametrize("key", [-1, 2**64])
def test_a_key_out_of_range_is_refused(key):
    with pytest.raises(ValueError, match=f"key: expected 0 to 2\\^64 - 1, got {key}"):
        keys(0, 1, key)
