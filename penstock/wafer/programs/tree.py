"""All-reduce by a tree as part of a program: along rows to one column, down and up that column to
one core, and back to all by one broadcast. What a core does depends on where it is: cores that do
the same share code.

A line is summed as a chain, in which each core adds its own to what comes, or as a star, in which
all words go straight to one core.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from penstock.errors import ConfigError
from penstock.wafer.closed_form import ReduceAlgorithm, fastest_all_reduce
from penstock.wafer.language import Code, Colour, MeshProgram, Part

_ACROSS = {"east": "west", "west": "east", "south": "north", "north": "south"}
_SIDES = (("west", "east"), ("north", "south"))  # of a row and of a column: backwards, ahead


class TreeReduce:
    """Colours and routes of an all-reduce; `emit` adds what a core does.

    Args:
        words: of the vector that is summed, 32 bits each.
        root: `centre`: lines are summed at their middle from both sides; `corner`: at their first
            core.
        algorithm: `chain` or `star`, by default the faster one. Cores of a star send to the middle
            one of their half of a line.

    Raises:
        ConfigError: a star of more than one word.
    """

    def __init__(
        self,
        program: MeshProgram,
        words: int = 1,
        root: Literal["centre", "corner"] = "centre",
        algorithm: ReduceAlgorithm | None = None,
    ) -> None:
        self.program, mesh = program, program.mesh
        centre = root == "centre"
        self.root = (mesh.rows // 2, mesh.columns // 2) if centre else (0, 0)
        self.words = words
        chosen = algorithm or fastest_all_reduce(mesh, program.core, words, root)
        self.is_star = chosen == "star"
        if self.is_star and words > 1:
            raise ConfigError(
                f"all-reduce: expected one word in a star, whose words mix on their way, got "
                f"{words}; take a chain"
            )
        self.colours: dict[str, Colour] = {}
        for side, back in _ACROSS.items():
            colour = self.colours[side] = program.colour(f"sums to the {side}")
            senders = [core for core in range(mesh.cores) if self._sends(core) == side]
            takers = [core for core in range(mesh.cores) if back in self._takes(core)]
            passers = [core for core in senders if self._passes(core)]
            program.route(colour, np.array(senders, int), "ramp", side, joins=self.is_star)
            program.route(colour, np.array(takers, int), back, "ramp")
            program.route(colour, np.array(passers, int), back, side, joins=True)
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

    def _along(self, core: int, side: str) -> tuple[int, int, int]:
        """Return the place of a core on the line through a side of it, that of the line's root, and
        the line's cores."""
        mesh, is_row = self.program.mesh, side in _SIDES[0]
        at = divmod(core, mesh.columns)[is_row]
        return at, self.root[is_row], mesh.columns if is_row else mesh.rows

    def _takes(self, core: int) -> dict[str, int]:
        """Return from how many cores sums come to a core, by the side on which they arrive."""
        found = {}
        # In a star the sum of the other half comes last, after the words of a core's own half.
        sides = self._outward(core)
        if self.is_star:
            sides = sorted(sides, key=[*_ACROSS].index)
        for side in sides:
            place, root, cores = self._along(core, side)
            beyond = cores - 1 - place if side in ("east", "south") else place
            if not self.is_star:
                found[side] = 1
            elif place == root:
                # The core before the root sums the words of its half of the line.
                found[side] = beyond if side in ("east", "south") else 1
            elif place == root - 1:
                found[side] = beyond
        return found

    def _passes(self, core: int) -> bool:
        """Return whether words of a star pass a core that sends, on their way to another."""
        inward = self._sends(core)
        return (
            self.is_star
            and _ACROSS[inward] in self._outward(core)
            and _ACROSS[inward] not in self._takes(core)
        )

    def _broadcast(self) -> None:
        """Route the result from the root along its column and from there along all rows."""
        for core in range(self.program.mesh.cores):
            inward = self._sends(core)  # the result comes from where the sum goes
            leaves = [*self._outward(core), *(["ramp"] if inward else [])]
            if leaves:
                self.program.route(self.result, np.array([core]), inward or "ramp", leaves)

    def role(self, core: int) -> tuple[object, ...]:
        """Return what a core does: cores with the same role share code."""
        return (self._sends(core), *self._takes(core).items())

    def emit(self, code: Code, core: int, part: Part) -> None:
        """Add to a core's code: `part` becomes the sum over all cores, as 32-bit numbers.

        Raises:
            ConfigError: the part has another number of elements than the tree has words.
        """
        if part.length != self.words:
            raise ConfigError(
                f"all-reduce: expected a part of {self.words} elements, as many as the tree has "
                f"words, got {part.length}"
            )
        if self.program.mesh.cores == 1:
            return
        sends, takes = self._sends(core), list(self._takes(core).items())
        passed_on = "" if self.is_star or not sends or not takes else takes.pop()[0]
        for side, cores in takes:
            # The words of all cores are added to the same part, one after the other.
            words = cores * part.length
            set_up, colour = code.core.vector_cycles, self.colours[_ACROSS[side]]
            code.stream(
                words, take=colour, into=part, adds=True, is_ring=True, pack=1, set_up=set_up
            )
        if not sends:
            code.work(code.core.drain_cycles)
            code.send(part, self.result, pack=1)
            return
        if passed_on:
            last = self.colours[_ACROSS[passed_on]]
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
