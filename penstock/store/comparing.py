"""Checksums by which replicas of a store are compared after every step.

A bit flip in the memory of one host changes no checksum of any message, and both replicas go on
with the same updates to different values. Each replica therefore reports checksums of a part of its
content. The step number alone chooses the part: a different part after every step, and the whole
content over one cycle.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

ROTATION = 100  # steps in which all memory of a store is compared once
_PIECE_BYTES = 1 << 20

Compared = Sequence[tuple[str, str]]
"""A description of the compared part, and its checksum."""


class Rotation:
    """The parts of a store in memory, one part for every step of a cycle.

    Args:
        slabs: descriptions of the content, with their memory, uint8.
    """

    def __init__(self, slabs: Iterable[tuple[str, np.ndarray]]) -> None:
        self._pieces = [
            (what, slab[begin : begin + _PIECE_BYTES])
            for what, slab in slabs
            for begin in range(0, slab.nbytes, _PIECE_BYTES)
        ]
        self.steps = max(1, min(ROTATION, len(self._pieces)))

    def part(self, step: int) -> Compared:
        """Return the checksums of the part that belongs to a step."""
        count, turn = len(self._pieces), step % self.steps
        chosen = self._pieces[count * turn // self.steps : count * (turn + 1) // self.steps]
        found = []
        for what, pieces in itertools.groupby(chosen, key=lambda piece: piece[0]):
            state = xxhash.xxh3_64()
            for _, piece in pieces:
                state.update(piece.data)
            found.append((what, state.hexdigest()))
        return found
