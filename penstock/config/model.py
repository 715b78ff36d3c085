"""`model`: a preset, a Hugging Face folder or configuration, or the user's own `nn.Module`.

Nothing here builds a model or imports torch; `penstock.models` does, from these classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.config.presets import preset_names, resolve_preset
from penstock.config.section import Patterns, Place, Section, refuse, setting
from penstock.errors import ConfigError, did_you_mean

FORMS = ("preset", "hf", "hf_config", "factory")


def _refuse_nan(overrides: Mapping[str, Any]) -> None:
    """Refuse NaN, which no key of a model takes; `transformers` lets it pass."""
    for key, value in overrides.items():
        if isinstance(value, float) and math.isnan(value):
            raise refuse(key, "expected a number, got nan")


class PresetModel(Section):
    """A preset by name, with any of its numbers changed: `{preset: gpt2, n_layer: 6}`."""

    preset: str = Field(description="name of a preset; `penstock program NAME` shows one")
    overrides: dict[str, Any] = setting(
        {}, "keys of the preset's Hugging Face configuration to change, given beside `preset`"
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_overrides(cls, value: Any) -> Any:
        if isinstance(value, dict) and "overrides" not in value:
            rest = {key: item for key, item in value.items() if key != "preset"}
            value = {key: item for key, item in value.items() if key == "preset"}
            value["overrides"] = rest
        return value

    @field_validator("preset")
    @classmethod
    def _known(cls, name: str) -> str:
        known = preset_names()
        if name not in known:
            hint = did_you_mean(name, known) or f" (there are: {', '.join(known)})"
            raise PydanticCustomError(
                "preset",
                "{text}",
                {"text": f"expected the name of a preset, got {name!r}{hint}"},
            )
        return name

    @model_validator(mode="after")
    def _resolves(self) -> PresetModel:
        _refuse_nan(self.overrides)
        try:
            resolve_preset(self.preset, self.overrides)
        except ConfigError as error:
            raise PydanticCustomError("preset", "{text}", {"text": str(error)}) from None
        return self

    @model_serializer
    def _flat(self) -> str | dict[str, Any]:
        return {"preset": self.preset, **self.overrides} if self.overrides else self.preset


class HuggingFaceModel(Section):
    """A model with its weights, from a local Hugging Face folder: `{hf: FOLDER}`."""

    hf: Place = Field(
        description="local Hugging Face folder: config.json, safetensors (single, sharded or "
        "packed) and tokenizer; weights are read one at a time, pickles (.bin, .pt) never"
    )
    ignore: Patterns = setting(
        (),
        "patterns of tensors in the folder that are ignored if the model does not have them",
        example=["classifier.*"],
    )
    overrides: dict[str, Any] = setting(
        {}, "keys of the folder's config.json to change, such as a dropout, given beside `hf`"
    )

    @model_validator(mode="before")
    @classmethod
    def _gather_overrides(cls, value: Any) -> Any:
        if isinstance(value, dict) and "overrides" not in value:
            own = {key: item for key, item in value.items() if key in ("hf", "ignore")}
            value = {**own, "overrides": {k: v for k, v in value.items() if k not in own}}
        return value

    @model_validator(mode="after")
    def _has_numbers(self) -> HuggingFaceModel:
        _refuse_nan(self.overrides)
        return self

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        ignore = {"ignore": list(self.ignore)} if self.ignore else {}
        return {"hf": self.hf, **ignore, **self.overrides}


class HuggingFaceConfigModel(Section):
    """A model of `transformers` from its configuration alone, with fresh weights."""

    hf_config: Place | dict[str, Any] = Field(
        description="path of a Hugging Face config.json (or its folder), or the mapping itself"
    )

    @field_validator("hf_config", mode="before")
    @classmethod
    def _path_or_mapping(cls, value: Any) -> Any:
        if not isinstance(value, str | dict):
            raise PydanticCustomError(
                "hf_config",
                "expected the path of a config.json or a mapping with its keys, got {got}",
                {"got": repr(value)},
            )
        if isinstance(value, dict) and "model_type" not in value:
            raise PydanticCustomError(
                "hf_config",
                "expected a mapping with model_type, got one without; add for example model_type: "
                "gpt2",
            )
        return value


class FactoryModel(Section):
    """A user's own module: a function that returns it, and optionally a loss of their own."""

    factory: str = Field(description="`package.module:function` that returns an nn.Module")
    args: dict[str, Any] = setting({}, "keyword arguments of the factory")
    task: Literal["causal_lm", "masked_lm", "custom"] | None = setting(
        None,
        "causal_lm, masked_lm: forward(input_ids) returns logits; custom: the loss is the "
        "module's own; null: the task of a transformers model, custom for other models",
    )
    loss: str | None = setting(
        None,
        "`package.module:function`(output, **targets) -> scalar loss; null: the module returns it",
        example="my_package.losses:cross_entropy",
    )

    @field_validator("factory", "loss")
    @classmethod
    def _dotted(cls, value: str | None) -> str | None:
        if value is not None:
            module, colon, function = value.partition(":")
            if not colon or not all(map(str.isidentifier, [*module.split("."), function])):
                raise PydanticCustomError(
                    "reference",
                    "expected package.module:function, got {got}; "
                    "name the module that can be imported and the function in it",
                    {"got": repr(value)},
                )
        return value


def _normalise(value: Any) -> Any:
    if isinstance(value, str):
        return {"preset": value}
    if isinstance(value, dict):
        given = [key for key in FORMS if key in value]
        if len(given) > 1:
            raise PydanticCustomError(
                "model", "expected one of {forms}, got {given}; keep one of them",
                {"forms": ", ".join(FORMS), "given": " and ".join(given)},
            )  # fmt: skip
        if not given:
            hints = (did_you_mean(str(key), FORMS) for key in value)
            keys = ", ".join(map(str, value)) or "an empty mapping"
            raise PydanticCustomError(
                "model", "expected one of {forms}, got {keys}{hint}; for example model: gpt2",
                {"forms": ", ".join(FORMS), "keys": keys, "hint": next(filter(None, hints), "")},
            )  # fmt: skip
        return value
    if isinstance(value, ModelSpec):
        return value
    raise PydanticCustomError(
        "model",
        "expected the name of a preset or a mapping with one of {forms}, got {got}; "
        "for example model: gpt2",
        {"forms": ", ".join(FORMS), "got": repr(value)},
    )


def _form(value: Any) -> str:
    if isinstance(value, dict):
        return next(key for key in FORMS if key in value)
    return next(key for key in FORMS if hasattr(value, key))


FORM_CLASSES: dict[str, type[Section]] = {
    "preset": PresetModel,
    "hf": HuggingFaceModel,
    "hf_config": HuggingFaceConfigModel,
    "factory": FactoryModel,
}
ModelSpec = PresetModel | HuggingFaceModel | HuggingFaceConfigModel | FactoryModel
ModelField = Annotated[
    Annotated[PresetModel, Tag("preset")]
    | Annotated[HuggingFaceModel, Tag("hf")]
    | Annotated[HuggingFaceConfigModel, Tag("hf_config")]
    | Annotated[FactoryModel, Tag("factory")],
    Discriminator(_form),
    BeforeValidator(_normalise),
]
