"""Cycles of communication patterns on lines and meshes of cores.

The form is that of Luczynski et al. (HPDC 2024, arXiv:2404.15888): words that meet at one core or
link, or the distance, whichever takes longer; and for every core that computes on the way
2 T_R + 1 cycles, up and down its ramp and one operation.
"""

from typing import Literal

from penstock.errors import ConfigError
from penstock.wafer.parameters import CoreParameters, Mesh

ReduceAlgorithm = Literal["chain", "star"]


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


def line_reduce_cycles(
    cores: int, words: int, core: CoreParameters, algorithm: ReduceAlgorithm | None = None
) -> float:
    """Return the cycles in which cores on a line sum vectors at one end.

    Args:
        algorithm: `chain`: each core adds its own to what comes, and sends the sum on; `star`: all
            words stream to the end, which adds them. By default the faster one.

    Raises:
        ConfigError: a star of more than one word. Words of several cores join on their way in any
            order, so that the end cannot tell which element of a vector each of them is.
    """
    _check(words=words, cores=cores)
    chosen = algorithm or ("star" if words == 1 else "chain")
    if chosen == "star" and words > 1:
        raise ConfigError(
            f"words: expected 1 for a star, whose words mix on their way, got {words}; take a chain"
        )
    if cores == 1:
        return 0.0
    far = cores - 1
    if chosen == "star":
        return spatial_cycles(core, contention=far, distance=far, depth=1)
    return words * core.word_cycles + spatial_cycles(core, contention=0, distance=far, depth=far)


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
    algorithm: ReduceAlgorithm | None = None,
) -> float:
    """Return the cycles in which every core gets the sum over all cores: along rows, then along one
    column, and back by one broadcast.

    Args:
        root: `centre` if each line is summed at its middle from both sides, as programs written by
            hand do; `corner` if each is summed at its end.
        algorithm: of each line, as for `line_reduce_cycles`; by default the one with fewer cycles.
    """
    if mesh.cores == 1:
        return 0.0
    chosen = algorithm or fastest_all_reduce(mesh, core, words, root)
    is_halved = root == "centre"
    total, far = 0.0, 0
    for length in (mesh.columns, mesh.rows):
        total += _line_cycles(length, words, core, chosen, is_halved)
        far += length // 2 if is_halved else length - 1
    back = core.vector_cycles + line_broadcast_cycles(far + 1, words, core)
    return total + back + 2 * core.drain_cycles  # of the sum, and of what comes back


def fastest_all_reduce(
    mesh: Mesh, core: CoreParameters, words: int, root: Literal["centre", "corner"]
) -> ReduceAlgorithm:
    """Return the algorithm with fewer cycles; arguments are those of `all_reduce_cycles`."""
    algorithms: tuple[ReduceAlgorithm, ...] = ("star", "chain") if words == 1 else ("chain",)
    return min(
        algorithms,
        key=lambda name: all_reduce_cycles(mesh, core, words, root=root, algorithm=name),
    )


def _line_cycles(
    length: int, words: int, core: CoreParameters, algorithm: ReduceAlgorithm, is_halved: bool
) -> float:
    """Return the cycles in which the cores of a line sum vectors, with the set-up of operations."""
    set_up = core.vector_cycles
    if length == 1:
        return 0.0
    if not is_halved:
        return set_up + line_reduce_cycles(length, words, core, algorithm)
    if algorithm == "chain":  # the middle core adds one side after the other
        second = set_up + words * core.word_cycles if length > 2 else 0.0
        return set_up + line_reduce_cycles(length // 2 + 1, words, core, algorithm) + second
    # Two cores in the middle sum a half each, then one sends its sum to the other.
    half = (length + 1) // 2
    halves = set_up + line_reduce_cycles(half, words, core, algorithm) if half > 1 else 0.0
    return halves + set_up + line_reduce_cycles(2, words, core, algorithm)


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name}: expected a number from 1 up, got {size}")
