"""`optimizer`: the update rule, its numbers, and groups of weights with numbers of their own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from penstock.config.schedule import ScheduleConfig
from penstock.config.section import Patterns, Section, refuse, section, setting

_USED_BY = {
    "betas": ("adamw", "lion"),
    "eps": ("adamw",),
    "momentum": ("sgd",),
    "nesterov": ("sgd",),
}
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "lion": {"betas": (0.9, 0.99)},
    "sgd": {"weight_decay": 0.0},
}
"""Where an optimizer's usual number is not that of AdamW, which the fields below declare."""


class GroupConfig(Section):
    """Weights that get numbers of their own; the first group that matches a weight applies."""

    match: Patterns = Field(description="patterns of weight names, as in the shell: `*.bias`")
    learning_rate_scale: float = setting(1.0, "factor on the learning rate", ge=0, le=1e6)
    weight_decay: float | None = setting(
        None, "weight decay of this group; null: the optimizer's", example=0.0, ge=0, le=1e6
    )

    @model_validator(mode="after")
    def _has_patterns(self) -> GroupConfig:
        if not self.match:
            raise refuse("match", "expected at least one pattern, got none; for example ['*.bias']")
        return self


class OptimizerConfig(Section):
    """The rule by which the store updates weights."""

    name: Literal["adamw", "sgd", "lion"] = setting("adamw", "update rule")
    learning_rate: float = setting(3e-4, "peak learning rate", gt=0, le=1e30)
    betas: Annotated[
        tuple[
            Annotated[float, Field(ge=0, lt=1)],
            Annotated[float, Field(ge=0, lt=1)],
        ],
        Field(strict=False),
    ] = setting((0.9, 0.95), "decay of the moments (adamw; lion, whose default is [0.9, 0.99])")
    eps: float = setting(1e-8, "added to the root of the second moment (adamw)", gt=0, le=1e6)
    momentum: float = setting(0.9, "momentum (sgd)", ge=0, lt=1)
    nesterov: bool = setting(False, "look-ahead momentum (sgd)")
    moments: Literal["fp32", "8bit"] = setting(
        "fp32",
        "format of the moments in the store; 8bit: a quarter of the bytes in memory and on flash, "
        "and other bits in the result",
    )
    weight_decay: float = setting(
        0.1, "weight decay, decoupled for adamw and lion; sgd's default is 0", ge=0, le=1e6
    )
    decay_1d: bool = setting(False, "also decay biases and norms, that is weights of one dimension")
    clip_norm: float | None = setting(
        1.0, "largest global norm of the gradient; null: no clipping", example=1.0, gt=0
    )
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False)] = setting(
        (), "groups of weights with their own settings", example=[{"match": ["*.bias"]}]
    )
    schedule: ScheduleConfig = section(ScheduleConfig, "the learning rate over the steps")

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_its_own(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            return {**_DEFAULTS_OF.get(value["name"], {}), **value}
        return value

    @model_validator(mode="after")
    def _consistent(self) -> OptimizerConfig:
        for key, names in _USED_BY.items():
            changed = getattr(self, key) != type(self).model_fields[key].default
            if changed and self.name not in names:
                raise refuse(
                    key,
                    f"has no effect on {self.name}; remove it, or choose {' or '.join(names)}",
                )
        if self.moments == "8bit" and self.name == "sgd" and self.momentum == 0:
            raise refuse("moments", "has no effect on sgd without momentum; remove it")
        if self.nesterov and self.momentum == 0:
            raise refuse("nesterov", "expected a momentum above 0 with nesterov, got 0")
        return self
