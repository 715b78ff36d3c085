"""Masks of all kinds over a weight, and plain NumPy references for what is done with them."""

from __future__ import annotations

import itertools

import numpy as np

from penstock.kernels.blocks import GRANULE

LENGTHS = [1, 254, 255, 256, 257, 4095, 4096, 4097, 3 * 4096, 20_011]
KINDS = ["empty", "full", "first", "last", "one", "dense", "half", "sparse", "rare", "rows", "gaps"]


def random_mask(kind: str, length: int, generator: np.random.Generator) -> np.ndarray:
    """A bool mask `[length]` of a kind."""
    mask = np.zeros(length, np.bool_)
    if kind in ("dense", "half", "sparse", "rare"):
        share = {"dense": 0.95, "half": 0.5, "sparse": 0.1, "rare": 0.003}[kind]
        mask = generator.random(length) < share
    elif kind == "rows":  # a power law: few places have most entries
        mask = generator.random(length) < 1 / (1 + np.arange(length) % 997)
    elif kind == "gaps":  # around one and two bytes
        gaps = generator.choice([253, 254, 255, 256, 509, 510, 511], length // 250 + 1)
        at = np.cumsum(gaps + 1) - 1
        mask[at[at < length]] = True
    elif kind == "full":
        mask[:] = True
    elif kind != "empty":
        mask[{"first": 0, "last": length - 1, "one": generator.integers(length)}[kind]] = True
    return mask


def random_cut(length: int, generator: np.random.Generator) -> list[tuple[int, int]]:
    """A division of the granules of `length` elements into adjacent ranges, some of them empty."""
    granules = -(-length // GRANULE)
    inner = np.sort(generator.integers(0, granules + 1, generator.integers(0, 4)))
    edges = [0, *inner.tolist(), granules]
    return list(itertools.pairwise(edges))


def philox2x32(positions: np.ndarray, key: int) -> np.ndarray:
    """Philox2x32-10 of Salmon et al. 2011 of int64 positions, as uint64."""
    half, low_half = np.uint64(32), np.uint64(0xFFFFFFFF)
    position = positions.astype(np.uint64)
    first, second = position & low_half, position >> half ^ np.uint64(key >> 32)
    word = key & 0xFFFFFFFF
    for _ in range(10):
        product = np.uint64(0xD256D193) * first
        first, second = product >> half ^ np.uint64(word) ^ second, product & low_half
        word = word + 0x9E3779B9 & 0xFFFFFFFF
    return first << half | second


def first_of(
    order: str, key: int, count: int, positions: np.ndarray, values: np.ndarray | None = None
) -> np.ndarray:
    """The positions that a full sort puts first: by magnitude, then by position key; rising."""
    by = [philox2x32(positions, key)]
    if order != "random":
        assert values is not None
        magnitudes = np.abs(values.astype(np.float64))
        by.append(magnitudes if order == "smallest" else -magnitudes)
    return np.sort(positions[np.lexsort(by)[:count]])
