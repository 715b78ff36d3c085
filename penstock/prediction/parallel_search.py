"""Exhaustive search for the best division of a model among the GPUs of a cluster.

Every divisor is tried; a division is skipped only where a lower bound of its time is above the best
time found. The result depends on nothing but the arguments.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.machines import GpuCluster
from penstock.prediction.gpu_cluster import (
    SECONDS_PER_DAY,
    Degrees,
    Division,
    ModelFigures,
    aligned,
    check_cluster,
    check_gpus,
    least_compute_seconds,
    memory_bytes,
    predict,
)

ZERO_STAGES = (0, 1, 2, 3)


def best_division(
    figures: ModelFigures,
    cluster: GpuCluster,
    gpus: int,
    *,
    zero_stages: Sequence[int] = ZERO_STAGES,
    tensor_across_nodes: bool = False,
) -> Division | None:
    """Return the division with the shortest step that uses a number of GPUs and fits; None if there
    is none.

    Of equal steps the one with the least memory is taken, then the smallest degrees.

    **Arguments:** `zero_stages` are the ZeRO stages to try; 0 and 1 alone are what Megatron-LM
    calls 3D parallelism.

    Raises:
        ConfigError: a number of GPUs that the cluster cannot have.
    """
    check_cluster(figures, cluster)
    check_gpus(cluster, gpus)
    space = _Space(figures, cluster, _checked(zero_stages), tensor_across_nodes)
    return _best(space, gpus, math.inf)


def fewest_gpus(
    figures: ModelFigures,
    cluster: GpuCluster,
    *,
    step_seconds: float | None = None,
    days: float | None = None,
    total_tokens: float | None = None,
    zero_stages: Sequence[int] = ZERO_STAGES,
    tensor_across_nodes: bool = False,
) -> Division:
    """Return the best division on the smallest number of GPUs whose step is short enough.

    **Arguments:** either `step_seconds`, or `days` and the `total_tokens` to train on in them.

    Raises:
        ConfigError: an incomplete target, or one that no number of GPUs reaches.
    """
    target = _target_seconds(figures, step_seconds, days, total_tokens)
    check_cluster(figures, cluster)
    space = _Space(figures, cluster, _checked(zero_stages), tensor_across_nodes)
    counts = _gpu_counts(space)
    for gpus in counts:
        if least_compute_seconds(figures, cluster, gpus, 1, 1) * (1 - 1e-9) > target:
            continue
        found = _best(space, gpus, target)
        if found is not None:
            return found
    raise ConfigError(
        f"expected a division with a step of at most {target:.3g} s on cluster {cluster.name}, "
        f"found none on 1 to {counts[-1]} GPUs; allow more time, or raise the batch so that more "
        "GPUs can share it"
    )


def _target_seconds(
    figures: ModelFigures,
    step_seconds: float | None,
    days: float | None,
    total_tokens: float | None,
) -> float:
    by_days = days is not None and total_tokens is not None
    if (step_seconds is None) != by_days or (step_seconds is not None and (days or total_tokens)):
        raise ConfigError(
            "expected either step_seconds, or days and total_tokens, got "
            f"step_seconds={step_seconds}, days={days}, total_tokens={total_tokens}"
        )
    for name, value in (
        ("step_seconds", step_seconds),
        ("days", days),
        ("total_tokens", total_tokens),
    ):
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: expected a number above 0, got {value:g}")
    if step_seconds is not None:
        return step_seconds
    assert days is not None
    assert total_tokens is not None
    return days * SECONDS_PER_DAY * figures.batch_tokens / total_tokens


@dataclass(frozen=True)
class _Space:
    """What is searched."""

    figures: ModelFigures
    cluster: GpuCluster
    zero_stages: tuple[int, ...]
    tensor_across_nodes: bool


def _checked(zero_stages: Sequence[int]) -> tuple[int, ...]:
    stages = tuple(sorted(set(zero_stages)))
    if not stages or not set(stages) <= set(ZERO_STAGES):
        raise ConfigError(
            f"zero_stages: expected one or more of {list(ZERO_STAGES)}, got {list(zero_stages)}"
        )
    return stages


def _best(space: _Space, gpus: int, limit: float) -> Division | None:
    """Return the best division whose step takes at most `limit`."""
    figures, cluster = space.figures, space.cluster
    best: Division | None = None
    for tensor, pipeline, data in _splits(space, gpus):
        bound = limit if best is None else best.step_seconds
        products = least_compute_seconds(figures, cluster, data, tensor, pipeline)
        if products * (1 - 1e-9) > bound:
            continue
        for degrees in _variants(space, data, tensor, pipeline, products, bound):
            if memory_bytes(figures, degrees) > cluster.gpu.memory - cluster.gpu.reserved:
                continue
            found = predict(figures, cluster, degrees)
            if found.step_seconds <= limit and (best is None or _rank(found) < _rank(best)):
                best = found
    return best


def _rank(division: Division) -> tuple[float, float, Degrees]:
    return division.step_seconds, division.memory_bytes, division.degrees


def _splits(space: _Space, gpus: int) -> Iterator[tuple[int, int, int]]:
    """Yield the degrees (tensor, pipeline, data) whose product is the number of GPUs."""
    for tensor in _tensor_degrees(space):
        for pipeline in _divisors(space.figures.stages):
            data, left = divmod(gpus, tensor * pipeline)
            if not left and data and not space.figures.sequences % data:
                yield tensor, pipeline, data


def _variants(
    space: _Space, data: int, tensor: int, pipeline: int, products: float, bound: float
) -> Iterator[Degrees]:
    """Yield all divisions with three given degrees whose products and bubble alone do not take
    longer than `bound`."""
    share = space.figures.sequences // data
    # With one replica there is nothing to share: all ZeRO stages are the first.
    stages = space.zero_stages if data > 1 else space.zero_stages[:1]
    for micro_batch in _divisors(share):
        micro_batches = share // micro_batch
        chunked = pipeline > 1 and micro_batches % pipeline == 0
        for chunks in _divisors(space.figures.stages // pipeline) if chunked else (1,):
            bubble = (pipeline - 1) / chunks / micro_batches
            if products * (1 + bubble) * (1 - 1e-9) > bound:
                continue
            for zero in stages:
                for recompute in (False, True):
                    yield Degrees(data, tensor, pipeline, micro_batch, chunks, zero, recompute)


def _tensor_degrees(space: _Space) -> list[int]:
    degrees = _divisors(space.figures.heads)
    return [n for n in degrees if aligned(space.cluster, n, space.tensor_across_nodes)]


def _gpu_counts(space: _Space) -> list[int]:
    """Return all numbers of GPUs that some division uses, ascending."""
    figures, most = space.figures, space.cluster.most
    pairs = {t * p for t in _tensor_degrees(space) for p in _divisors(figures.stages)}
    counts = {pair * data for pair in pairs for data in _divisors(figures.sequences)}
    return sorted(count for count in counts if most is None or count <= most)


def _divisors(number: int) -> tuple[int, ...]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(low + [number // n for n in reversed(low) if n * n != number])
