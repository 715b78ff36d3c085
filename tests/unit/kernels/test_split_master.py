"""The two halves of a master restore it to the bit, and the high half is its nearest bfloat16."""

import numpy as np
import pytest
import torch

from penstock.kernels.split_master import join, split

SEEDS = (0, 1, 2)


def halves(master: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high, low = np.empty(master.size, np.uint16), np.empty(master.size, np.uint16)
    split(master, high, low)
    return high, low


def restored(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    master = np.empty(high.size, np.float32)
    join(high, low, master)
    return master


def torch_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def check(bits: np.ndarray) -> None:
    master = bits.view(np.float32)
    high, low = halves(master)
    np.testing.assert_array_equal(restored(high, low).view(np.uint32), bits)

    finite = np.isfinite(master)
    rounded = torch_bfloat16(master)
    # A tie between an even lower neighbour and an odd upper one is where the two roundings part.
    tie_to_even = ((bits & 0xFFFF) == 0x8000) & ((bits >> 16) % 2 == 0)
    same = finite & ~tie_to_even
    np.testing.assert_array_equal(high[same], rounded[same])
    np.testing.assert_array_equal(high[finite & tie_to_even], rounded[finite & tie_to_even] + 1)


def test_every_low_half_round_trips_for_sampled_high_halves():
    low = np.arange(65536, dtype=np.uint32)
    special = [0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0xFF7F, 0x7F80, 0x7FC0]
    random = np.random.default_rng(0).integers(0, 65536, 40).tolist()
    for high in special + random:
        check((np.uint32(high) << 16) | low)


def test_every_high_half_round_trips_for_low_halves_at_the_limits():
    high = np.arange(65536, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check(high | np.uint32(low))


@pytest.mark.slow
def test_every_float32_round_trips():
    for start in range(0, 1 << 32, 1 << 24):
        check(np.arange(start, start + (1 << 24), dtype=np.uint64).astype(np.uint32))


@pytest.mark.parametrize("length", [*range(41), 255, 257, 65535, 65536, 65537])
def test_any_length_round_trips(length):
    bits = np.random.default_rng(length).integers(0, 1 << 32, length, dtype=np.uint32)
    high, low = halves(bits.view(np.float32))
    np.testing.assert_array_equal(restored(high, low).view(np.uint32), bits)


def test_only_the_given_elements_are_written():
    high, low = np.full(100, 7, np.uint16), np.full(100, 7, np.uint16)
    split(np.ones(37, np.float32), high[20:57], low[20:57])
    assert (high[:20] == 7).all()
    assert (high[57:] == 7).all()
    assert (low[57:] == 7).all()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (np.ones(3, np.float64), "weight: expected float32, got float64"),
        (np.ones((3, 1), np.float32), "weight: expected shape [3], got [3, 1]"),
        (np.ones(6, np.float32)[::2], "weight: expected contiguous, aligned memory"),
    ],
)
def test_invalid_arrays_are_refused(argument, message):
    with pytest.raises(ValueError, match="weight") as caught:
        split(argument, np.empty(3, np.uint16), np.empty(3, np.uint16))
    assert str(caught.value).startswith(message)


def test_read_only_memory_is_never_written():
    high = np.zeros(3, np.uint16)
    high.flags.writeable = False
    with pytest.raises(ValueError, match="high half of the weight: expected memory that can be"):
        split(np.ones(3, np.float32), high, np.zeros(3, np.uint16))
