"""The global norm of a step's gradients, from the reports of all shards.

A commit has two phases. First every shard reports (`GradientReport`). Then the norm, which needs
all reports, is sent to all shards. Squares are summed per fixed block of the whole weight, and
block sums are added exactly. The norm is therefore bit-identical for every division of the weights.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import NonFiniteError, NoTrainingError
from penstock.kernels.exact_sum import exact_sum
from penstock.store.holding import Holding, home_stages


@dataclass(frozen=True)
class GradientReport:
    """The report on the gradients that have arrived in a step.

    `squares` add up, exactly, to the sum of the squares of all elements; the sum is not finite if
    an element is not. `silent` are stages with trainable weights that have sent nothing. `missing`
    are weights without a gradient. `non_finite` are weights whose gradient contains NaN or
    infinity, by stage. `zero` are weights whose gradient is zero in every element of this holding,
    with the number of these elements.
    """

    squares: tuple[float, ...]
    silent: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    non_finite: Mapping[int, tuple[str, ...]] | None = None
    zero: Mapping[str, int] = field(default_factory=dict)


def merged(holding: Holding, reports: Sequence[GradientReport]) -> GradientReport:
    """Return the report on a whole holding, from the reports of its shards."""
    missing = {name for report in reports for name in report.missing}
    zero = Counter[str]()
    for report in reports:
        zero.update(report.zero)
    non_finite: dict[int, set[str]] = {}
    for report in reports:
        for stage, names in (report.non_finite or {}).items():
            non_finite.setdefault(stage, set()).update(names)
    squares = np.array([part for report in reports for part in report.squares], np.float64)
    return GradientReport(
        exact_sum(squares),
        tuple(sorted({stage for report in reports for stage in report.silent})),
        tuple(name for name in home_stages(holding) if name in missing),
        {
            stage: tuple(n for n in holding.stages[stage].weights if n in names)
            for stage, names in non_finite.items()
        },
        dict(zero),
    )


def zero_gradients(holding: Holding, report: GradientReport) -> tuple[str, ...]:
    """Return the weights whose gradient is zero in every element of all pieces."""
    weights = holding.weights
    return tuple(n for n in home_stages(holding) if 0 < weights[n].elements == report.zero.get(n))


def global_norm(
    holding: Holding, step: int, report: GradientReport, clip_norm: float | None
) -> float:
    """Return the norm of the gradients of `step`, rounded once from the exact sum.

    **Arguments:** `clip_norm` is only for the advice in an error.

    Raises:
        NoTrainingError: a trainable weight received no gradient.
        NonFiniteError: a gradient is NaN or infinite.
    """
    if report.silent:
        silent = [holding.stages[index].name for index in report.silent]
        raise NoTrainingError(
            f"step {step}: no gradients were received from {_some('stage', silent)}; every stage "
            "with trainable weights must send them before the commit"
        )
    if report.missing:
        raise NoTrainingError(
            f"step {step}: no gradient for {_some('trainable weight', report.missing)}: the loss "
            "does not depend on it; freeze weights that should not train, or use them in the loss"
        )
    if report.non_finite:
        raise NonFiniteError(_describe_non_finite(holding, step, report.non_finite, clip_norm))
    return math.sqrt(math.fsum(report.squares))


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """Return the factor of `torch.nn.utils.clip_grad_norm_` for a global norm."""
    if clip_norm is None:
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))


def _describe_non_finite(
    holding: Holding,
    step: int,
    non_finite: Mapping[int, tuple[str, ...]],
    clip_norm: float | None,
) -> str:
    first, *rest = sorted(non_finite, reverse=True)  # in the order of the backward sweep
    text = (
        f"step {step} is not committed: NaN or infinity in the gradient of "
        f"{_some('weight', non_finite[first])} of stage {holding.stages[first].name}"
    )
    others = [holding.stages[index].name for index in rest]
    if others:
        text += f", then of {_some('stage', others)}"
    clip = ", set optimizer.clip_norm" if clip_norm is None else " or optimizer.clip_norm"
    return f"{text}; lower the learning rate{clip}, or check the data"


def _some(what: str, names: Sequence[str], limit: int = 5) -> str:
    """Return a short list of names: `weight a`, `weights a, b`, `weights a, b, c, d, e and 7
    more`."""
    rest = len(names) - limit
    shown = ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
    return f"{what}{'s' if len(names) > 1 else ''} {shown}"
