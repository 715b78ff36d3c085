"""`engine`: the computing device and its resources."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from penstock.config.section import Section, refuse, setting
from penstock.config.size import ByteSize, size_or_auto

_DEVICE = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,3})")


def _all_or_names(value: Any) -> Any:
    """Accept a list of device names, `all` and null; reject other values with an error of
    Penstock."""
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    if value is None or value == "all" or is_list:
        return value
    raise PydanticCustomError(
        "devices",
        "expected all, null or a list such as [cuda:0, cuda:1], got {value}",
        {"value": repr(value)},
    )


Devices = Annotated[
    Literal["all"] | Annotated[tuple[str, ...], Field(strict=False)] | None,
    BeforeValidator(_all_or_names),
]


class EngineConfig(Section):
    """One engine; all engines are alike."""

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        (
            "device of the engines; auto: cuda if this machine has a GPU. The choice holds for all "
            "engines"
        ),
    )
    devices: Devices = setting(
        None,
        "several devices of this host, each with its own engine: [cuda:0, cuda:1], or all, for "
        "all GPUs. Each device fetches a part of every stage from the store, and the devices "
        "exchange the parts. [cpu, cpu] tests this without GPUs. null: `device`",
        example=["cuda:0", "cuda:1"],
    )
    memory: Annotated[
        ByteSize | Literal["auto"],
        PlainValidator(size_or_auto),
        PlainSerializer(str),
    ] = setting(
        "auto",
        "budget of one engine for activations and streamed weights, such as 4GiB; auto: a share "
        "of the memory that is free at the start; for engines on other hosts too, the free memory "
        "of this host counts, as for one engine",
        unit="bytes",
    )
    recompute: Literal["auto", "always", "never"] = setting(
        "auto",
        "recomputation of a stage's activations in backward. always: recompute all; never: keep "
        "all; auto: keep what fits. The result is the same to the bit",
    )
    threads: int | None = setting(
        None,
        "CPU threads; null: the cores of the machine",
        unit="threads",
        example=4,
        ge=1,
        le=1024,
    )

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        names = self.devices
        if names is None:
            return self
        if names == "all":
            if self.device == "cpu":
                raise refuse("device", "expected auto or cuda with engine.devices: all, got cpu")
            return self
        if not names:
            raise refuse("devices", "expected at least one device, got an empty list")
        for name in names:
            if not _DEVICE.fullmatch(name):
                raise refuse("devices", f"expected cpu, or cuda:0 and the like, got {name!r}")
        kinds = {name.partition(":")[0] for name in names}
        if len(kinds) > 1:
            raise refuse(
                "devices",
                f"expected devices of one kind, got {', '.join(names)}; CPU and GPU round "
                "differently, so a run has one kind",
            )
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if kinds == {"cuda"} and twice:
            raise refuse("devices", f"expected each GPU once, got {', '.join(twice)} again")
        if self.device not in ("auto", *kinds):
            raise refuse(
                "device", f"expected auto with engine.devices: {names[0]} ..., got {self.device}"
            )
        return self
