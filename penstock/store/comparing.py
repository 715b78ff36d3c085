"""What stores that should hold the same say of it after every step, so that it can be compared.

A bit that flips in the memory of one of two hosts changes no checksum of any message, and both go
on making the same updates to what is not the same any more. So each says checksums of a part of
what it holds, chosen by the step alone: another part after every step, all of it in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

ROTATION = 100  # steps in which all of a store in memory is compared once
_PIECE_BYTES = 1 << 20

Compared = Sequence[tuple[str, str]]
"""What is compared, in words, and its checksum."""


class Rotation:
    """The parts of a store in memory, one for every step of a turn.

    Args:
        slabs: what there is, in words, and its memory, uint8.
    """

    def __init__(self, slabs: Iterable[tuple[str, np.ndarray]]) -> None:
        self._pieces = [
            (what, slab[begin : begin + _PIECE_BYTES])
            for what, slab in slabs
            for begin in range(0, slab.nbytes, _PIECE_BYTES)
        ]
        self.steps = max(1, min(ROTATION, len(self._pieces)))

    def part(self, step: int) -> Compared:
        """Return the checksums of the part whose turn it is after a step."""
        count, turn = len(self._pieces), step % self.steps
        chosen = self._pieces[count * turn // self.steps : count * (turn + 1) // self.steps]
        found = []
        for what, pieces in itertools.groupby(chosen, key=lambda piece: piece[0]):
            state = xxhash.xxh3_64()
            for _, piece in pieces:
                state.update(piece.data)
            found.append((what, state.hexdigest()))
        return found
