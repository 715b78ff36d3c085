"""The parameters of a wafer's cores and of the mesh that joins them, with their sources.

Two named sets are given. `SIM` has the costs that the vendor's simulator shows, `SILICON` those that
third parties measured on machines; the simulator is known to be optimistic on memory paths. Cycles
are those of the cores' clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """A rectangle of cores."""

    rows: int
    columns: int

    @property
    def cores(self) -> int:
        """The number of cores."""
        return self.rows * self.columns


@dataclass(frozen=True)
class CoreParameters:
    """The costs of one core, its router and its links.

    Attributes:
        name: of the set.
        clock_hz: of all cores.
        sram_bytes: memory of a core, for code and data.
        simd_half, simd_float: multiply-adds per cycle of 16-bit and of 32-bit numbers.
        task_cycles: from the arrival of a message to the first instruction of its task.
        vector_cycles: to set up one vector operation.
        loop_cycles: of one iteration of a loop besides its body.
        hop_cycles: of a message from one router to the next.
        word_cycles: between two words on one link, at least 1.
        ramp_cycles: of a message between a core and its router.
        queue_words: depth of a router's queue for one colour and direction.
        partial_sum_cycles: of a core for one output feature, to pass a partial sum on.
    """

    name: str
    clock_hz: float = 1.1e9
    sram_bytes: int = 48 * 1024
    simd_half: int = 4
    simd_float: int = 1
    task_cycles: float = 2.0
    vector_cycles: float = 0.0
    loop_cycles: float = 0.0
    hop_cycles: float = 1.0
    word_cycles: float = 1.0
    ramp_cycles: float = 2.0
    queue_words: int = 4
    partial_sum_cycles: float = 4.0


SIM = CoreParameters("sim")
SILICON = CoreParameters("silicon", vector_cycles=16.0, hop_cycles=2.0, word_cycles=1.125)
