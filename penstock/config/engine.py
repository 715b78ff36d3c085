"""`engine`: the device that computes, and what it may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PlainSerializer, PlainValidator

from penstock.config.section import Section, setting
from penstock.config.size import ByteSize, size_or_auto


class EngineConfig(Section):
    """One engine; all engines are alike."""

    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "where stages run; auto: cuda if there is one"
    )
    memory: Annotated[
        ByteSize | Literal["auto"],
        PlainValidator(size_or_auto),
        PlainSerializer(str),
    ] = setting(
        "auto",
        "budget of one engine for activations and streamed weights, such as 4GiB; auto: a share "
        "of what is free at the start",
        unit="bytes",
    )
    recompute: Literal["auto", "always", "never"] = setting(
        "auto",
        "what backward does for a stage's inner values: always computes them again, never keeps "
        "them all, auto keeps what fits. The result is the same to the bit",
    )
    threads: int | None = setting(
        None,
        "CPU threads; null: the cores of the machine",
        unit="threads",
        example=4,
        ge=1,
        le=1024,
    )
