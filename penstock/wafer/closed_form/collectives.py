"""Cycles of communication patterns on lines and meshes of cores.

The form is that of Luczynski et al. (HPDC 2024, arXiv:2404.15888): words that meet at one core or
link, or the distance, whichever takes longer; and for every core that computes on the way
2 T_R + 1 cycles, up and down its ramp and one operation.
"""

from __future__ import annotations

from typing import Literal

from penstock.errors import ConfigError
from penstock.wafer.parameters import CoreParameters, Mesh


def spatial_cycles(
    core: CoreParameters, *, contention: float, distance: float, depth: float
) -> float:
    """Return the cycles of a pattern.

    Args:
        contention: words that pass the busiest core or link.
        distance: hops of the longest way.
        depth: cores on that way that compute.
    """
    moving = max(contention * core.word_cycles, distance * core.hop_cycles)
    return moving + (2 * core.ramp_cycles + 1) * depth


def relay_cycles(words: int, cores: int, core: CoreParameters) -> float:
    """Return the cycles in which words pass from core to core, each of which stores all of them
    before it sends them on. Each core, and the first, waits for one vector operation."""
    _check(words=words, cores=cores)
    alone = core.vector_cycles + core.drain_cycles
    return (cores + 1) * alone + cores * words * core.word_cycles


def line_reduce_cycles(cores: int, words: int, core: CoreParameters) -> float:
    """Return the cycles in which cores on a line sum vectors at one end: the faster of a star (all
    words stream to the end, which adds them) and a chain (each core adds its own and sends on)."""
    _check(words=words, cores=cores)
    if cores == 1:
        return 0.0
    far = cores - 1
    star = spatial_cycles(core, contention=far * words, distance=far, depth=1)
    chain = words * core.word_cycles + spatial_cycles(core, contention=0, distance=far, depth=far)
    return min(star, chain)


def line_broadcast_cycles(cores: int, words: int, core: CoreParameters) -> float:
    """Return the cycles in which one end of a line sends words to all of its cores."""
    _check(words=words, cores=cores)
    if cores == 1:
        return 0.0
    return words * core.word_cycles + spatial_cycles(
        core, contention=0, distance=cores - 1, depth=1
    )


def all_reduce_cycles(
    mesh: Mesh,
    core: CoreParameters,
    words: int = 1,
    *,
    root: Literal["centre", "corner"] = "centre",
) -> float:
    """Return the cycles in which every core gets the sum over all cores: along rows, then along one
    column, and back.

    Args:
        root: `centre` if each line is summed at its middle from both sides, and the four middle
            cores exchange their sums, as programs written by hand do; `corner` if each is summed
            at its end.
    """
    halves = root == "centre"
    total = 0.0
    for length in (mesh.columns, mesh.rows):
        cores = (length + 1) // 2 if halves else length
        total += line_reduce_cycles(cores, words, core)
        total += line_broadcast_cycles(cores, words, core)
        if halves and length > 1:
            total += line_reduce_cycles(2, words, core)
        # The sum that a line begins with is the result of a vector operation.
        total += core.vector_cycles + core.drain_cycles
    return total


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name}: expected a number from 1 up, got {size}")
