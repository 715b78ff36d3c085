"""`engine`: the computing device and its resources."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from penstock.config.section import Place, Section, refuse, setting
from penstock.config.size import ByteSize, size_or_auto

_MESH = re.compile(r"0*[1-9][0-9]{0,7}x0*[1-9][0-9]{0,7}")
_EMPTY_MESH = re.compile(r"0+x[0-9]+|[0-9]+x0+")
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


def _mesh_text(value: Any) -> Any:
    """Accept the text of a mesh with at least one core."""
    if isinstance(value, str) and _MESH.fullmatch(value):
        return value
    text = repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, str) and _EMPTY_MESH.fullmatch(value):
        text += ", which has no cores"
    elif type(value) is int and f"{value:x}".isdecimal():
        text += (
            f"; if 0x{value:x} was written: YAML reads 0x{value:x} as a hexadecimal number, quote "
            "it; and give it rows from 1 up"
        )
    raise PydanticCustomError(
        "mesh",
        "expected rows and columns from 1 up, such as 32x32, got {value}",
        {"value": text},
    )


MeshText = Annotated[str, BeforeValidator(_mesh_text)]


class EngineConfig(Section):
    """One engine; all engines are alike."""

    device: Literal["auto", "cpu", "cuda", "wafer"] = setting(
        "auto",
        (
            "device of the engines; auto: cuda if this machine has a GPU. The choice holds for all "
            "engines. wafer: the numbers of cpu, and the cycles that each stage would take on a "
            "wafer-scale engine"
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
    cuda_graphs: bool = setting(
        True,
        "of device cuda: record the second step as CUDA graphs and repeat it, so that the host "
        "does not launch kernels one by one. The result is the same to the bit; models with "
        "dropout or with operators that wait for the host, groups of devices, sparse weights on "
        "engines in other processes, and steps for which the GPU lacks memory are not recorded",
    )
    threads: int | None = setting(
        None,
        "CPU threads; null: the cores of the machine",
        unit="threads",
        example=4,
        ge=1,
        le=1024,
    )

    mesh: MeshText = setting(
        "750x994",
        "of device wafer: cores of the mesh, rows x columns; a CS-2 has 750x994",
        example="32x32",
    )
    cores: Place = setting(
        "sim",
        "of device wafer: costs of a core. sim: what the vendor's simulator shows; silicon: what "
        "is measured on machines; or the path of a file of parameters, which ends in .yaml",
        example="silicon",
    )
    cycles: Literal["closed_form", "simulated"] = setting(
        "closed_form",
        "of device wafer: where cycles come from. closed_form: formulas, for any model; simulated: "
        "the products of weights run on the simulator of the mesh, which also gives their numbers, "
        "for small models in fp32",
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
