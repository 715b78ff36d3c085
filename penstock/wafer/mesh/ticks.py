"""Cycles as whole numbers of ticks, so that fractions of a cycle are honoured exactly.

A set of parameters with 1.25 and 1.37 cycles has 100 ticks in a cycle: every duration is then a
whole number, and a link of 1.125 cycles per word carries 8 words in 9 cycles, always the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from penstock.errors import ConfigError
from penstock.wafer.parameters import CoreParameters

_MOST_TICKS = 1000
_DURATIONS = (
    "task_cycles",
    "vector_cycles",
    "loop_cycles",
    "hop_cycles",
    "word_cycles",
    "ramp_cycles",
    "partial_sum_cycles",
    "drain_cycles",
    "half_group_cycles",
    "float_group_cycles",
    "dot_group_cycles",
    "scalar_cycles",
)


@dataclass(frozen=True)
class Ticks:
    """How many ticks a cycle has."""

    per_cycle: int

    @classmethod
    def of(cls, core: CoreParameters) -> Ticks:
        """Return the fewest ticks in which every duration of a set is a whole number.

        Raises:
            ConfigError: that needs more than 1,000 ticks in a cycle.
        """
        per_cycle = 1
        for name in _DURATIONS:
            value = Fraction(getattr(core, name)).limit_denominator(_MOST_TICKS)
            exact = abs(float(value) - getattr(core, name)) < 1e-9
            per_cycle = math.lcm(per_cycle, value.denominator)
            if not exact or per_cycle > _MOST_TICKS:
                raise ConfigError(
                    f"{name}: expected cycles that together with those before it divide a cycle "
                    f"into at most {_MOST_TICKS} equal parts, got {getattr(core, name)!r}; "
                    "round it, for example to a hundredth"
                )
        return cls(per_cycle)

    def count(self, cycles: float) -> int:
        """Return the ticks of some cycles, rounded to the nearest."""
        return round(cycles * self.per_cycle)
