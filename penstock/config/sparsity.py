"""`sparsity`: which entries of the weights exist, and how that changes over the run."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from penstock.config.section import Patterns, Section, refuse, section, setting

_USED_BY: dict[str, tuple[str, ...]] = {
    "initial_mask": ("static", "set", "rigl"),
    "schedule": ("gmp",),
    "update_every": ("gmp", "set", "rigl"),
    "update_begin": ("set", "rigl"),
    "update_end": ("set", "rigl"),
    "drop_fraction": ("set", "rigl"),
    "drop_decay": ("set", "rigl"),
    "drop_power": ("set", "rigl"),
}


class SparsityScheduleConfig(Section):
    """The sparsity over the steps, of gradual pruning."""

    name: Literal["constant", "linear", "cosine", "exponential", "power"] = setting(
        "power", "shape between begin and end; constant: the final sparsity from the begin on"
    )
    initial: float = setting(0.0, "sparsity at the beginning", ge=0, lt=1)
    begin: int | float = setting(
        0.25, "first step of pruning; a share of the run if written with a decimal point", ge=0
    )
    end: int | float = setting(
        0.75,
        "step at which the final sparsity is reached; a share of the run if written with a "
        "decimal point",
        ge=0,
    )
    power: float = setting(3.0, "exponent of power", gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> SparsityScheduleConfig:
        _require_share("begin", self.begin)
        _require_share("end", self.end)
        if type(self.begin) is type(self.end) and self.begin > self.end:
            raise refuse(
                "end", f"expected an end that is not before the begin, {self.begin}, got {self.end}"
            )
        if self.power != type(self).model_fields["power"].default and self.name != "power":
            raise refuse(
                "power",
                f"has no effect on the schedule {self.name}; remove it, or choose the name power",
            )
        return self


class SparsityConfig(Section):
    """Only some entries of the sparse weights are stored, streamed and trained."""

    method: Literal["static", "gmp", "set", "rigl"] | None = setting(
        None,
        "how masks change: static (never), gmp (gradual magnitude pruning), set (grown at random), "
        "rigl (grown by gradient); null: no weight is sparse",
        example="rigl",
    )
    sparsity: float | None = setting(
        None,
        "share of the entries that do not exist, at the end; may be null with initial_mask: zeros, "
        "which takes the share of the checkpoint",
        example=0.9,
        ge=0,
        lt=1,
    )
    weights: Patterns = setting(
        (),
        "patterns of the names of sparse weights; empty: weights of two dimensions, but for "
        "embeddings, adapters, and the output head of a transformers model. The head of a module "
        "of your own is sparse, unless it is tied to an embedding or keep_dense names it",
        example=["*.mlp.*.weight"],
    )
    keep_dense: Patterns = setting(
        (), "patterns of the names of weights that stay dense", example=["*.c_attn.weight"]
    )
    distribution: Literal["uniform", "erdos_renyi_kernel"] = setting(
        "uniform",
        "how the sparsity is distributed: equal for all weights, or denser where a weight is small",
    )
    initial_mask: Literal["random", "magnitude", "balanced", "zeros"] = setting(
        "random",
        "which entries exist at the start (static, set, rigl). random: random ones; magnitude: "
        "those of the greatest magnitude; balanced: random ones, equally many per row; zeros: "
        "those that are not zero in the weights of model.hf, whose sparsity it keeps",
    )
    schedule: SparsityScheduleConfig = section(
        SparsityScheduleConfig, "the sparsity over the steps (gmp)"
    )
    update_every: int = setting(
        100, "steps between two changes of the masks", unit="steps", ge=1, le=10**12
    )
    update_begin: int | float = setting(
        0, "step of the first change (set, rigl); a share of the run with a decimal point", ge=0
    )
    update_end: int | float = setting(
        0.75,
        "step from which on masks stay (set, rigl); a share of the run with a decimal point",
        ge=0,
    )
    drop_fraction: float = setting(
        0.3, "share of the kept entries that a change exchanges (set, rigl)", gt=0, lt=1
    )
    drop_decay: Literal["constant", "cosine", "linear", "inverse_power"] = setting(
        "cosine", "how drop_fraction falls until update_end (set, rigl)"
    )
    drop_power: float = setting(3.0, "exponent of inverse_power", gt=0)
    densify_at: int | float | None = setting(
        None,
        "step at which all masks are lifted; a share of the run with a decimal point; null: never",
        example=0.8,
        ge=0,
    )

    @model_validator(mode="after")
    def _consistent(self) -> SparsityConfig:
        if self.method is None:
            for key in type(self).model_fields:
                if self._is_changed(key):
                    raise refuse(
                        key, "has no effect without a method; set sparsity.method, such as rigl"
                    )
            return self
        if self.sparsity is None and self.initial_mask != "zeros":
            raise refuse("sparsity", "expected a share with sparsity.method, such as 0.9, got null")
        for key, methods in _USED_BY.items():
            if self._is_changed(key) and self.method not in methods:
                raise refuse(
                    key,
                    f"has no effect on {self.method}; remove it, or choose {' or '.join(methods)}",
                )
        if self.initial_mask == "zeros" and self._is_changed("distribution"):
            raise refuse(
                "distribution",
                "has no effect with initial_mask: zeros, which takes the zeros of the checkpoint; "
                "remove it, or choose another initial_mask",
            )
        self._check_places()
        return self

    def _check_places(self) -> None:
        for key in ("update_begin", "update_end", "densify_at"):
            _require_share(key, getattr(self, key))
        if self.densify_at == 0:
            raise refuse(
                "densify_at",
                "expected a step of 1 or more, got 0; a run without masks has no sparsity.method",
            )
        if self.method == "rigl" and self.update_every < 2:
            raise refuse(
                "update_every",
                "expected at least 2 with rigl, whose changes take the place of the weights' "
                f"update in their step, got {self.update_every}",
            )
        begin, end = self.update_begin, self.update_end
        if type(begin) is type(end) and begin > end:
            raise refuse("update_end", f"expected an end not before {begin}, got {end}")
        if self.drop_power != 3.0 and self.drop_decay != "inverse_power":
            raise refuse(
                "drop_power",
                f"has no effect on the decay {self.drop_decay}; remove it, or choose inverse_power",
            )
        if self.sparsity is not None and self.schedule.initial > self.sparsity:
            raise refuse(
                "schedule.initial",
                f"expected at most the final sparsity, {self.sparsity}, got "
                f"{self.schedule.initial}",
            )

    def _is_changed(self, key: str) -> bool:
        field = type(self).model_fields[key]
        return getattr(self, key) != field.get_default(call_default_factory=True)


def check_places(config: SparsityConfig, run_steps: int) -> None:
    """Check that nothing is to happen after the end of the run; called by the whole
    configuration's validator."""
    for key, place in _places(config).items():
        if isinstance(place, int) and place > run_steps:
            raise refuse(
                f"sparsity.{key}",
                f"step {place} is after the end of the run, step {run_steps}; lower it, or raise "
                "run.steps",
            )
    steps = places_as_steps(config, run_steps)
    if steps.pop("densify_at", 1) < 1:
        raise refuse(
            "sparsity.densify_at",
            f"expected a place after step 0 of the {run_steps} steps, got {config.densify_at}; "
            "write the number of a step",
        )
    if steps:
        (_, first), (key, last) = steps.items()
        if first > last:
            raise refuse(
                f"sparsity.{key}",
                f"expected an end that is not before the begin, step {first}, got step {last}; "
                "raise it, or begin earlier",
            )


def places_as_steps(config: SparsityConfig, run_steps: int) -> dict[str, int]:
    """Return the keys that name a place in the run, each with its step: the begin before the end.

    A share of the run is another step in a longer run.
    """
    return {key: _step(place, run_steps) for key, place in _places(config).items()}


def _places(config: SparsityConfig) -> dict[str, int | float]:
    """Return the keys that name a place in the run and have an effect."""
    places: dict[str, int | float] = {}
    if config.method == "gmp":
        places["schedule.begin"] = config.schedule.begin
        places["schedule.end"] = config.schedule.end
    elif config.method in ("set", "rigl"):
        places |= {"update_begin": config.update_begin, "update_end": config.update_end}
    if config.densify_at is not None:
        places["densify_at"] = config.densify_at
    return places


def _step(place: int | float, run_steps: int) -> int:
    return round(place * run_steps) if isinstance(place, float) else place


def _require_share(key: str, place: int | float | None) -> None:
    if isinstance(place, float) and place > 1:
        raise refuse(
            key,
            f"expected a share of the run from 0.0 to 1.0, or a whole number of steps, got {place}",
        )
