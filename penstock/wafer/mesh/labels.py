"""The names of a program's parts, for messages about cores, colours and cycles."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.wafer.parameters import Mesh

SIDES = ("north", "east", "south", "west", "ramp")
KINDS = ("data", "control")
THREAD_NAMES = ("compute", "receive", "send")


@dataclass(frozen=True, eq=False)
class Labels:
    """Names by number.

    Attributes:
        colours, counters: in the order of their numbers.
        instructions: what each row of the code is, such as `axpy of y`.
        queues: core, colour and side of each queue [queues, 3]; side 5 is that of queues to cores.
    """

    mesh: Mesh
    colours: Sequence[str]
    counters: Sequence[str]
    instructions: Sequence[str]
    queues: np.ndarray

    def core(self, number: int) -> str:
        """Return the place of a core."""
        return f"core ({number // self.mesh.columns}, {number % self.mesh.columns})"

    def colour(self, number: int) -> str:
        """Return a colour with its name."""
        return f"colour {self.colours[number]!r}"
