"""A machine as data: what the planner must know of it, in the form of its YAML file.

A machine is one store, a number of equal engines, and the links between them. On an ordinary host
the store and the engine are the same processor. On a host with a GPU they are joined by a bus, in a
cluster by a network or a fabric that broadcasts and reduces.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

from pydantic import Field, model_validator

from penstock.config import ByteSize, Section, refuse, setting
from penstock.machines.rates import RateCurve, RateTable


class EnginePart(Section):
    """One engine: the device that computes a program's stages."""

    most: int | None = setting(None, "engines that the machine can have; null: any number", ge=1)
    is_host: bool = setting(
        False, "whether the engine is the processor of the store's host, and computes in its memory"
    )
    memory: ByteSize | None = setting(
        None, "memory for activations and streamed weights; null: the host's", example="40GB"
    )
    micro_batch_tokens: int = setting(
        4096, "tokens of a micro-batch beyond which products are no faster", ge=1
    )
    operator_seconds: float = setting(
        0.0, "time that a call of an operator takes besides its work", unit="s", ge=0
    )
    stage_seconds: float = setting(
        0.0, "time that an engine takes per stage and micro-batch besides its operators", ge=0
    )
    rates: tuple[RateCurve, ...] = Field(strict=False, description="speed by kind of work")
    watts: float | None = setting(None, "power of one engine while it computes", unit="W", ge=0)
    price: float | None = setting(None, "price of one engine", unit="USD/hour", ge=0)

    @cached_property
    def speed(self) -> RateTable:
        """The engine's rates."""
        return RateTable(self.rates, "engine.rates")


class FlashPart(Section):
    """The disk of the store."""

    size: ByteSize | None = setting(None, "its size; null: not known", example="1TB")
    rates: tuple[RateCurve, ...] = Field(
        strict=False, description="`flash read` and `flash write`, by the bytes of a call"
    )
    both: float | None = setting(
        None, "bytes per second of reads and writes together; null: the two do not disturb", gt=0
    )

    @cached_property
    def speed(self) -> RateTable:
        """The disk's rates."""
        return RateTable(self.rates, "store.flash.rates")


class StorePart(Section):
    """The store's host or hosts: memory, optimizer, flash."""

    memory: ByteSize = setting(..., "memory of all hosts of the store", example="24GiB")
    cores: int = setting(1, "processor cores of a host", ge=1)
    rates: tuple[RateCurve, ...] = Field(strict=False, description="`update`, `receive`, `copy`")
    flash: FlashPart | None = setting(None, "its disk; null: none")
    watts: float | None = setting(None, "power of the whole store", unit="W", ge=0)
    price: float | None = setting(None, "price of the whole store", unit="USD/hour", ge=0)

    @cached_property
    def speed(self) -> RateTable:
        """The store's rates."""
        return RateTable(self.rates, "store.rates")


class LinkPart(Section):
    """The way between the store and an engine; on an engine that is the host there is none."""

    weights: float = setting(..., "bytes per second to one engine", unit="bytes/s", gt=0)
    gradients: float = setting(..., "bytes per second from one engine", unit="bytes/s", gt=0)
    store: float | None = setting(
        None,
        "bytes per second that the store sends, and receives, in all; null: no limit",
        unit="bytes/s",
        gt=0,
    )
    fan_out: int | None = setting(
        None,
        "engines, or further nodes, to which a node of the fabric broadcasts and from which it "
        "reduces; null: the store serves each engine itself",
        ge=2,
    )
    seconds: float = setting(0.0, "latency of one node of the fabric, or of a message", ge=0)
    value_bytes: int | None = setting(
        None, "bytes of a streamed value; null: those of the program's type", ge=1
    )


class Accuracy(Section):
    """The interval in which nine of ten measured runs lay: measured time over predicted time."""

    low: float = setting(..., "lower end", gt=0)
    high: float = setting(..., "upper end", gt=0)
    runs: int = setting(..., "number of measured runs", ge=1)
    source: str = setting(..., "where they are recorded")

    @model_validator(mode="after")
    def _check(self) -> Accuracy:
        if self.low > self.high:
            raise refuse("low", f"expected at most high ({self.high:g}), got {self.low:g}")
        return self


class MachineDescription(Section):
    """A machine: one store, equal engines, and the links between them."""

    name: str = setting(..., "short name")
    title: str = setting("", "one line about the machine")
    kind: Literal["host", "cluster", "wafer"] = setting(..., "kind of machine")
    processor: str | None = setting(None, "name of the processor, as the system reports it")
    engine: EnginePart = setting(..., "one engine")
    store: StorePart = setting(..., "the store")
    link: LinkPart | None = setting(None, "between store and engine; null: they are one processor")
    accuracy: Accuracy | None = setting(None, "how near predictions were; null: never measured")
    sources: dict[str, str] = Field(
        default_factory=dict, description="where the figures come from, by key"
    )

    @model_validator(mode="after")
    def _check(self) -> MachineDescription:
        if self.engine.is_host and self.link is not None:
            raise refuse("link", "expected null for an engine that is the host (engine.is_host)")
        if not self.engine.is_host and self.link is None:
            raise refuse(
                "link", "missing; an engine that is not the host needs a link to the store"
            )
        if not self.engine.is_host and self.engine.memory is None:
            raise refuse("engine.memory", "missing; an engine that is not the host has its own")
        for part, table, work in (
            ("engine.rates", self.engine.speed, "product"),
            ("engine.rates", self.engine.speed, "pointwise"),
            ("store.rates", self.store.speed, "update"),
        ):
            if not table.has(work):  # type: ignore[arg-type]
                raise refuse(part, f"expected a curve of work {work!r}, got none")
        flash = self.store.flash
        for work in ("flash read", "flash write"):
            if flash is not None and not flash.speed.has(work):  # type: ignore[arg-type]
                raise refuse("store.flash.rates", f"expected a curve of work {work!r}, got none")
        return self
