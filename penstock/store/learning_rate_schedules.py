"""The learning rate as a pure function of the step number.

A schedule is plain data and has no state, so a resumed run needs only its step. The first
`warmup_steps` steps rise linearly from 0 (the rate of step 0 is then 0, as in the schedules of
`transformers`); the schedule itself then begins at the peak.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a run.

    Raises:
        ConfigError: from the constructor, for an unknown name or an invalid value.
    """

    name: str
    peak: float
    """The learning rate at the end of the warm-up, greater than 0 (or 0: nothing moves)."""
    decay_steps: int = 0
    """Step at which `linear`, `cosine` and `polynomial` reach `final_ratio`, and stay."""
    warmup_steps: int = 0
    final_ratio: float = 0.0
    """Share of the peak, 0 to 1, at which `linear`, `cosine` and `polynomial` end."""
    power: float = 1.0
    """Exponent of `polynomial`."""
    boundaries: tuple[int, ...] = ()
    """`piecewise`: rising steps (warm-up included in the count) at which the ratio changes."""
    ratios: tuple[float, ...] = ()
    """`piecewise`: share of the peak from each boundary on; 1 before the first."""

    def __post_init__(self) -> None:
        if self.name not in _SHAPES:
            raise ConfigError(
                f"schedule {self.name!r} is not known{did_you_mean(self.name, _SHAPES)}; "
                f"choose one of {', '.join(_SHAPES)}"
            )
        if not (math.isfinite(self.peak) and self.peak >= 0):
            raise ConfigError(f"learning rate: expected 0 or more, got {self.peak}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warm-up: expected 0 steps or more, got {self.warmup_steps}")
        if not 0 <= self.final_ratio <= 1:
            raise ConfigError(f"final_ratio: expected a share from 0 to 1, got {self.final_ratio}")
        if self.name in ("linear", "cosine", "polynomial") and (
            self.decay_steps <= self.warmup_steps
        ):
            raise ConfigError(
                f"schedule {self.name!r} needs more steps than its warm-up: "
                f"{self.decay_steps} steps, {self.warmup_steps} of them warm-up; "
                "lower the warm-up or train longer"
            )
        if self.name == "polynomial" and not self.power > 0:
            raise ConfigError(f"polynomial schedule: expected a power above 0, got {self.power}")
        if self.name == "piecewise":
            self._check_pieces()

    def _check_pieces(self) -> None:
        if len(self.boundaries) != len(self.ratios):
            raise ConfigError(
                "piecewise schedule: expected one ratio per boundary, got "
                f"{len(self.boundaries)} boundaries and {len(self.ratios)} ratios"
            )
        pairs = zip(self.boundaries, self.boundaries[1:], strict=False)
        if any(later <= earlier for earlier, later in pairs):
            raise ConfigError(
                f"piecewise schedule: expected rising boundaries, got {list(self.boundaries)}"
            )
        if any(not ratio >= 0 for ratio in self.ratios):
            raise ConfigError(
                f"piecewise schedule: expected ratios of 0 or more, got {list(self.ratios)}"
            )


def _progress(schedule: Schedule, step: int) -> float:
    """From 0 at the end of the warm-up to 1 at the end of the run, and 1 after it."""
    length = schedule.decay_steps - schedule.warmup_steps
    return min(1.0, (step - schedule.warmup_steps) / length)


def _falling(schedule: Schedule, share: float) -> float:
    """`share`, which falls from 1 to 0, rescaled to end at the final ratio."""
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * share


def _constant(schedule: Schedule, step: int) -> float:
    return 1.0


def _linear(schedule: Schedule, step: int) -> float:
    return _falling(schedule, 1.0 - _progress(schedule, step))


def _cosine(schedule: Schedule, step: int) -> float:
    return _falling(schedule, 0.5 * (1.0 + math.cos(math.pi * _progress(schedule, step))))


def _polynomial(schedule: Schedule, step: int) -> float:
    return _falling(schedule, (1.0 - _progress(schedule, step)) ** schedule.power)


def _inverse_square_root(schedule: Schedule, step: int) -> float:
    # Vaswani et al., "Attention Is All You Need", 2017, scaled to be 1 at the end of the warm-up.
    origin = max(1, schedule.warmup_steps)
    return math.sqrt(origin / max(origin, step))


def _piecewise(schedule: Schedule, step: int) -> float:
    passed = bisect.bisect_right(schedule.boundaries, step)
    return schedule.ratios[passed - 1] if passed else 1.0


_SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "inverse_square_root": _inverse_square_root,
    "piecewise": _piecewise,
}


def learning_rate(schedule: Schedule, step: int) -> float:
    """Return the learning rate of step `step` (from 0).

    Raises:
        ValueError: `step` is negative.
    """
    if step < 0:
        raise ValueError(f"learning_rate: steps count from 0, got {step}")
    if step < schedule.warmup_steps:
        return schedule.peak * (step / schedule.warmup_steps)
    return schedule.peak * _SHAPES[schedule.name](schedule, step)
