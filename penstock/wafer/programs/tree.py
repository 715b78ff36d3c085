"""All-reduce by a tree as part of a program: along rows to one column, down and up that column to
one core, and back to all by one broadcast. What a core does depends on where it is: cores that do
the same share code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from penstock.wafer.language import Code, Colour, MeshProgram, Part

_ACROSS = {"east": "west", "west": "east", "south": "north", "north": "south"}


class TreeReduce:
    """Colours and routes of an all-reduce; `emit` adds what a core does.

    Args:
        root: `centre`: lines are summed at their middle from both sides; `corner`: at their first
            core.
    """

    def __init__(self, program: MeshProgram, root: Literal["centre", "corner"] = "centre") -> None:
        self.program, mesh = program, program.mesh
        centre = root == "centre"
        self.root = (mesh.rows // 2, mesh.columns // 2) if centre else (0, 0)
        self.colours: dict[str, Colour] = {}
        for side, back in _ACROSS.items():
            colour = self.colours[side] = program.colour(f"sums to the {side}")
            senders = [core for core in range(mesh.cores) if self._sends(core) == side]
            takers = [core for core in range(mesh.cores) if side in self._takes(core)]
            program.route(colour, np.array(senders, int), "ramp", side)
            program.route(colour, np.array(takers, int), back, "ramp")
        self.result = program.colour("result")
        self._broadcast()

    def _place(self, core: int) -> tuple[int, int]:
        row, column = divmod(core, self.program.mesh.columns)
        return row - self.root[0], column - self.root[1]

    def _sends(self, core: int) -> str:
        """Return the side to which a core sends its sum; empty at the root."""
        row, column = self._place(core)
        if column:
            return "east" if column < 0 else "west"
        return "" if not row else "south" if row < 0 else "north"

    def _outward(self, core: int) -> list[str]:
        """Return the sides of a core on which the tree goes on, away from the root."""
        mesh = self.program.mesh
        (row, column), (at_row, at_column) = self._place(core), divmod(core, mesh.columns)
        sides = {
            "west": column <= 0 and at_column > 0,
            "east": column >= 0 and at_column < mesh.columns - 1,
            "north": not column and row <= 0 and at_row > 0,
            "south": not column and row >= 0 and at_row < mesh.rows - 1,
        }
        return [side for side, goes_on in sides.items() if goes_on]

    def _takes(self, core: int) -> list[str]:
        """Return the directions in which sums come to a core."""
        return [_ACROSS[side] for side in self._outward(core)]

    def _broadcast(self) -> None:
        """Route the result from the root along its column and from there along all rows."""
        for core in range(self.program.mesh.cores):
            inward = self._sends(core)  # the result comes from where the sum goes
            leaves = [*self._outward(core), *(["ramp"] if inward else [])]
            if leaves:
                self.program.route(self.result, np.array([core]), inward or "ramp", leaves)

    def role(self, core: int) -> tuple[str, ...]:
        """Return what a core does: cores with the same role share code."""
        return (self._sends(core), *self._takes(core))

    def emit(self, code: Code, core: int, part: Part) -> None:
        """Add to a core's code: `part` becomes the sum over all cores, as 32-bit numbers."""
        if self.program.mesh.cores == 1:
            return
        sends, takes = self._sends(core), self._takes(core)
        for side in takes[:-1] if sends else takes:
            code.receive(part, self.colours[side], adds=True, pack=1)
        if not sends:
            code.work(code.core.drain_cycles)
            code.send(part, self.result, pack=1)
            return
        if takes:
            last = self.colours[takes[-1]]
            code.receive_add_send(part, last, self.colours[sends], pack=1)
        else:
            code.send(part, self.colours[sends], pack=1)
        code.receive(part, self.result, pack=1)
        code.work(code.core.drain_cycles)


def by_role(program: MeshProgram, role: Callable[[int], object]) -> list[tuple[int, np.ndarray]]:
    """Return cores in groups of equal roles: one of them, and all."""
    groups: dict[object, list[int]] = {}
    for core in range(program.mesh.cores):
        groups.setdefault(role(core), []).append(core)
    return [(cores[0], np.array(cores)) for cores in groups.values()]
