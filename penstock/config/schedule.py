"""`optimizer.schedule`: the learning rate as a function of the step."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from penstock.config.section import Counts, Numbers, Section, refuse, setting

DECAYING = ("linear", "cosine", "polynomial")
_USED_BY = {
    "final_ratio": DECAYING,
    "decay_steps": DECAYING,
    "power": ("polynomial",),
    "boundaries": ("piecewise",),
    "ratios": ("piecewise",),
}


class ScheduleConfig(Section):
    """A shape of the learning rate, after a linear warm-up."""

    name: Literal[
        "constant", "linear", "cosine", "polynomial", "inverse_square_root", "piecewise"
    ] = setting("cosine", "shape after the warm-up")
    warmup_steps: int = setting(
        0, "steps over which the rate rises linearly from 0", unit="steps", ge=0, le=10**12
    )
    decay_steps: int | None = setting(
        None,
        "step at which linear, cosine and polynomial reach final_ratio; null: run.steps",
        unit="steps",
        example=1000,
        ge=1,
        le=10**12,
    )
    final_ratio: float = setting(
        0.1, "rate at the end, as a share of the peak (linear, cosine, polynomial)", ge=0, le=1
    )
    power: float = setting(1.0, "exponent of polynomial", gt=0)
    boundaries: Counts = setting(
        (), "steps at which piecewise changes the rate, rising", unit="steps", example=[500, 800]
    )
    ratios: Numbers = setting(
        (), "share of the peak from each boundary on (piecewise)", example=[0.1, 0.01]
    )

    @model_validator(mode="after")
    def _consistent(self) -> ScheduleConfig:
        for key, names in _USED_BY.items():
            changed = getattr(self, key) != type(self).model_fields[key].default
            if changed and self.name not in names:
                raise refuse(
                    key,
                    f"has no effect on the schedule {self.name}; remove it, or choose "
                    f"{' or '.join(names)}",
                )
        if self.name == "piecewise":
            self._check_pieces()
        if self.name == "inverse_square_root" and self.warmup_steps < 1:
            raise refuse(
                "warmup_steps",
                f"expected at least 1 with inverse_square_root, got {self.warmup_steps}; "
                "the rate falls as sqrt(warmup_steps / step)",
            )
        return self

    def _check_pieces(self) -> None:
        if not self.boundaries:
            raise refuse("boundaries", "expected at least one step with piecewise, got none")
        if len(self.boundaries) != len(self.ratios):
            raise refuse(
                "ratios",
                f"expected one ratio per boundary, got {len(self.ratios)} for "
                f"{len(self.boundaries)}",
            )
        if list(self.boundaries) != sorted(set(self.boundaries)) or self.boundaries[0] < 1:
            raise refuse(
                "boundaries", f"expected rising steps from 1 up, got {list(self.boundaries)}"
            )
        if min(self.ratios) < 0:
            raise refuse("ratios", f"expected ratios from 0 up, got {min(self.ratios)}")
