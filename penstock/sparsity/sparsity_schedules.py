"""Sparsity, times of mask changes and drop fraction as pure functions of the step.

A schedule is plain data and has no state, so a resumed run needs only its step. Steps are those of
commits: the first is 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ConfigError, did_you_mean


def steps_of(place: int | float, run_steps: int) -> int:
    """Return a place in a run as a step.

    Args:
        place: a step if an integer, else a share of the run from 0 to 1.
        run_steps: number of steps of the run.

    Raises:
        ConfigError: the place is before the start or after the end of the run.
    """
    if isinstance(place, float):
        if not 0 <= place <= 1:
            raise ConfigError(
                f"sparsity: expected a share of the run from 0 to 1, or a whole number of steps, "
                f"got {place}"
            )
        return round(place * run_steps)
    if not 0 <= place <= run_steps:
        raise ConfigError(
            f"sparsity: step {place} is outside the run of {run_steps} steps; lower it, or train "
            "longer"
        )
    return place


@dataclass(frozen=True)
class ChangeTimes:
    """The steps at which masks change: `begin`, and then every `every` steps, up to `end`.

    Raises:
        ConfigError: from the constructor, for an empty range or a frequency below 1.
    """

    begin: int
    end: int
    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(
                f"sparsity: expected a mask change every 1 step or more, got {self.every}"
            )
        if not 0 <= self.begin <= self.end:
            raise ConfigError(
                f"sparsity: expected the schedule to begin at step 0 or later and not after its "
                f"end, got steps {self.begin} to {self.end}"
            )

    def is_due(self, step: int) -> bool:
        """Return whether masks change at the commit of step `step`."""
        return self.begin <= step <= self.end and (step - self.begin) % self.every == 0


@dataclass(frozen=True)
class SparsitySchedule:
    """The sparsity over a run: `initial` until `begin`, `final` from `end` on.

    `constant` is `final` from the first step on. `exponential` lowers the density by a constant
    factor per step. `power` is the schedule of Zhu & Gupta, "To prune, or not to prune", 2017,
    equation 1, whose exponent is 3.

    Raises:
        ConfigError: from the constructor, for an unknown name or an invalid value.
    """

    name: str
    final: float
    initial: float = 0.0
    begin: int = 0
    end: int = 0
    power: float = 3.0

    def __post_init__(self) -> None:
        if self.name not in _SHAPES:
            raise ConfigError(
                f"sparsity schedule {self.name!r} is not known{did_you_mean(self.name, _SHAPES)}; "
                f"choose one of {', '.join(_SHAPES)}"
            )
        for key, sparsity in (("sparsity", self.final), ("initial sparsity", self.initial)):
            require_sparsity(key, sparsity)
        if not 0 <= self.begin <= self.end:
            raise ConfigError(
                f"sparsity: expected the schedule to begin at step 0 or later and not after its "
                f"end, got steps {self.begin} to {self.end}"
            )
        if not (math.isfinite(self.power) and self.power > 0):
            raise ConfigError(f"sparsity schedule: expected a power above 0, got {self.power}")


def require_sparsity(key: str, sparsity: float) -> None:
    """Check a sparsity, the share of a weight's entries that do not exist.

    Raises:
        ConfigError: it is not from 0 to below 1.
    """
    if not 0 <= sparsity < 1:
        raise ConfigError(
            f"{key}: expected a share of absent entries from 0 to below 1, such as 0.9, got "
            f"{sparsity}"
        )


def sparsity_at(schedule: SparsitySchedule, step: int) -> float:
    """Return the sparsity from the commit of step `step` on.

    Raises:
        ValueError: `step` is negative.
    """
    if step < 0:
        raise ValueError(f"sparsity_at: expected a step of 0 or more, got {step}")
    if schedule.name == "constant" or step >= schedule.end:
        return schedule.final
    if step <= schedule.begin:
        return schedule.initial
    progress = (step - schedule.begin) / (schedule.end - schedule.begin)
    return _SHAPES[schedule.name](schedule, progress)


def _towards(schedule: SparsitySchedule, left: float) -> float:
    """The final sparsity, from which the share `left` of the way is missing."""
    return schedule.final + (schedule.initial - schedule.final) * left


def _constant(schedule: SparsitySchedule, progress: float) -> float:
    return schedule.final


def _linear(schedule: SparsitySchedule, progress: float) -> float:
    return _towards(schedule, 1 - progress)


def _cosine(schedule: SparsitySchedule, progress: float) -> float:
    return _towards(schedule, 0.5 * (1 + math.cos(math.pi * progress)))


def _exponential(schedule: SparsitySchedule, progress: float) -> float:
    initial, final = 1 - schedule.initial, 1 - schedule.final
    return 1 - initial * (final / initial) ** progress


def _power(schedule: SparsitySchedule, progress: float) -> float:
    return _towards(schedule, (1 - progress) ** schedule.power)


_SHAPES: dict[str, Callable[[SparsitySchedule, float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "exponential": _exponential,
    "power": _power,
}


@dataclass(frozen=True)
class DropFraction:
    """The share of a weight's kept entries that a mask change exchanges.

    Sources: `constant` is Mocanu et al., "Scalable training of artificial neural networks with
    adaptive sparse connectivity inspired by network science" (SET), 2018. `cosine` is Evci et al.,
    "Rigging the Lottery: Making All Tickets Winners" (RigL), 2020, equation 1; `inverse_power`,
    (1 - t / end)^power, and `linear`, the same with power 1, are in its appendix on update
    schedules.

    Raises:
        ConfigError: from the constructor, for an unknown name or an invalid value.
    """

    initial: float
    end: int
    name: str = "cosine"
    power: float = 3.0

    def __post_init__(self) -> None:
        if self.name not in _DECAYS:
            raise ConfigError(
                f"decay of the drop fraction {self.name!r} is not known"
                f"{did_you_mean(self.name, _DECAYS)}; choose one of {', '.join(_DECAYS)}"
            )
        if not 0 < self.initial < 1:
            raise ConfigError(
                f"drop fraction: expected a share between 0 and 1, such as 0.3, got {self.initial}"
            )
        if self.end < 1:
            raise ConfigError(f"drop fraction: expected to end at step 1 or later, got {self.end}")
        if not (math.isfinite(self.power) and self.power > 0):
            raise ConfigError(f"drop fraction: expected a power above 0, got {self.power}")


def drop_fraction_at(fraction: DropFraction, step: int) -> float:
    """Return the share of kept entries that a mask change at step `step` exchanges; 0 from the end
    on.

    Raises:
        ValueError: `step` is negative.
    """
    if step < 0:
        raise ValueError(f"drop_fraction_at: expected a step of 0 or more, got {step}")
    if step >= fraction.end:
        return 0.0
    return fraction.initial * _DECAYS[fraction.name](step / fraction.end, fraction.power)


_DECAYS: dict[str, Callable[[float, float], float]] = {
    "constant": lambda progress, power: 1.0,
    "cosine": lambda progress, power: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress, power: 1 - progress,
    "inverse_power": lambda progress, power: (1 - progress) ** power,
}
