"""The result of a closed form: cycles by term, and which of them binds."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ProductCycles:
    """The cycles of one operation on a mesh, by term.

    The cores' own time is a sum; every other resource (`limits`) works beside them, and the slowest
    decides; `waiting` is what both lose where they are nearly as busy. `fill` is the time in which
    the first word arrives and the last result leaves.

    Attributes:
        name: of the operation.
        arithmetic: of the fullest row of cores, multiply-adds of its vector operations.
        set_up: of these vector operations, besides their elements.
        partial_sums: of a core, to take part in the sums of all output features.
        skew: of rows of cores that wait for each other.
        waiting: of cores for links and of links for cores, beyond the slower of them; 0 where no
            mask is given.
        fill: at the beginning and the end.
        limits: cycles that other resources need, by name.
        useful: of the mean core, multiply-adds alone at the full width of the vector unit.
    """

    name: str
    arithmetic: float
    set_up: float = 0.0
    partial_sums: float = 0.0
    skew: float = 0.0
    waiting: float = 0.0
    fill: float = 0.0
    limits: Mapping[str, float] = field(default_factory=dict)
    useful: float = 0.0

    @property
    def cores(self) -> float:
        """The cycles that the cores need."""
        return self.arithmetic + self.set_up + self.partial_sums + self.skew

    @property
    def total(self) -> float:
        """All cycles."""
        return max(self.cores, *self.limits.values(), 0.0) + self.waiting + self.fill

    @property
    def binding(self) -> str:
        """The resource that decides: `cores`, or a name among the limits."""
        slowest = max(self.limits, key=self.limits.__getitem__, default="cores")
        return slowest if self.limits.get(slowest, 0.0) > self.cores else "cores"

    @property
    def largest_part(self) -> str:
        """The term that takes longest: a limit if one binds, else a part of the cores' time, the
        waiting or the fill."""
        parts = {
            "arithmetic": self.arithmetic,
            "vector set-up": self.set_up,
            "partial sums": self.partial_sums,
            "skew": self.skew,
        }
        if self.binding != "cores":
            parts = {self.binding: self.limits[self.binding]}
        parts["waiting"] = self.waiting
        parts["fill"] = self.fill
        return max(parts, key=parts.__getitem__)

    @property
    def utilization(self) -> float:
        """The share of the cores' multiply-adds that is used."""
        return self.useful / self.total if self.total else 0.0

    def as_dict(self) -> dict[str, float | str]:
        """Return all terms as plain values, in the order of a table."""
        return {
            "name": self.name,
            "cycles": self.total,
            "binding": self.binding,
            "arithmetic": self.arithmetic,
            "set_up": self.set_up,
            "partial_sums": self.partial_sums,
            "skew": self.skew,
            "waiting": self.waiting,
            "fill": self.fill,
            **{f"limit: {name}": value for name, value in self.limits.items()},
            "utilization": self.utilization,
        }
