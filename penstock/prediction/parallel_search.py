"""Exhaustive search for the best division of a model among the GPUs of a cluster.

Every divisor is tried; a division is skipped only where a lower bound of its time is above the best
time found. The result depends on nothing but the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.errors import ConfigError
from penstock.machines.gpu_cluster import GpuCluster
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


def best_division(
    figures: ModelFigures, cluster: GpuCluster, gpus: int, *, tensor_across_nodes: bool = False
) -> Division | None:
    """Return the division with the shortest step that uses a number of GPUs and fits; None if there
    is none.

    Of equal steps the one with the least memory is taken, then the smallest degrees.

    Raises:
        ConfigError: a number of GPUs that the cluster cannot have.
    """
    check_cluster(figures, cluster)
    check_gpus(cluster, gpus)
    return _best(figures, cluster, gpus, math.inf, tensor_across_nodes)


def fewest_gpus(
    figures: ModelFigures,
    cluster: GpuCluster,
    *,
    step_seconds: float | None = None,
    days: float | None = None,
    total_tokens: float | None = None,
    tensor_across_nodes: bool = False,
) -> Division:
    """Return the best division on the smallest number of GPUs whose step is short enough.

    **Arguments:** either `step_seconds`, or `days` and the `total_tokens` to train on in them.

    Raises:
        ConfigError: an incomplete target, or one that no number of GPUs reaches.
    """
    target = _target_seconds(figures, step_seconds, days, total_tokens)
    check_cluster(figures, cluster)
    counts = _gpu_counts(figures, cluster, tensor_across_nodes)
    for gpus in counts:
        if least_compute_seconds(figures, cluster, gpus, 1, 1) * (1 - 1e-9) > target:
            continue
        found = _best(figures, cluster, gpus, target, tensor_across_nodes)
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


def _best(
    figures: ModelFigures, cluster: GpuCluster, gpus: int, limit: float, across: bool
) -> Division | None:
    """Return the best division whose step takes at most `limit`."""
    best: Division | None = None
    for tensor, pipeline, data in _splits(figures, cluster, gpus, across):
        bound = limit if best is None else best.step_seconds
        products = least_compute_seconds(figures, cluster, data, tensor, pipeline)
        if products * (1 - 1e-9) > bound:
            continue
        for degrees in _variants(figures, data, tensor, pipeline, products, bound):
            if memory_bytes(figures, degrees) > cluster.gpu.memory - cluster.gpu.reserved:
                continue
            found = predict(figures, cluster, degrees)
            if found.step_seconds <= limit and (best is None or _rank(found) < _rank(best)):
                best = found
    return best


def _rank(division: Division) -> tuple[float, float, Degrees]:
    return division.step_seconds, division.memory_bytes, division.degrees


def _splits(
    figures: ModelFigures, cluster: GpuCluster, gpus: int, across: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield the degrees (tensor, pipeline, data) whose product is the number of GPUs."""
    for tensor in _divisors(figures.heads):
        if gpus % tensor or not aligned(cluster, tensor, across):
            continue
        for pipeline in _divisors(figures.stages):
            data, left = divmod(gpus // tensor, pipeline)
            if not left and data and not figures.sequences % data:
                yield tensor, pipeline, data


def _variants(
    figures: ModelFigures, data: int, tensor: int, pipeline: int, products: float, bound: float
) -> Iterator[Degrees]:
    """Yield all divisions with three given degrees whose products and bubble alone do not take
    longer than `bound`."""
    share = figures.sequences // data
    for micro_batch in _divisors(share):
        micro_batches = share // micro_batch
        chunked = pipeline > 1 and micro_batches % pipeline == 0
        for chunks in _divisors(figures.stages // pipeline) if chunked else (1,):
            bubble = (pipeline - 1) / chunks / micro_batches
            if products * (1 + bubble) * (1 - 1e-9) > bound:
                continue
            for zero in range(4) if data > 1 else (0,):
                for recompute in (False, True):
                    yield Degrees(data, tensor, pipeline, micro_batch, chunks, zero, recompute)


def _gpu_counts(figures: ModelFigures, cluster: GpuCluster, across: bool) -> list[int]:
    """Return all numbers of GPUs that some division uses, ascending."""
    tensors = [t for t in _divisors(figures.heads) if aligned(cluster, t, across)]
    pairs = {t * p for t in tensors for p in _divisors(figures.stages)}
    counts = {pair * data for pair in pairs for data in _divisors(figures.sequences)}
    most = cluster.most
    return sorted(count for count in counts if most is None or count <= most)


def _divisors(number: int) -> tuple[int, ...]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(low + [number // n for n in reversed(low) if n * n != number])
