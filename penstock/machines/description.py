"""A machine as data: what the planner must know of it, in the form of its YAML file.

A machine is one store, a number of equal engines, and the links between them. On an ordinary host
the store and the engine are the same processor. On a host with a GPU they are joined by a bus, in a
cluster by a network or a fabric that broadcasts and reduces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from penstock.config import ByteSize, Section, refuse, refuse_all, setting
from penstock.machines.bounds import LARGEST_RATIO, LONGEST_SECONDS, SLOWEST_RATE
from penstock.machines.rates import RateCurve, RateTable, Work

ENGINE_WORK: tuple[Work, ...] = (
    "product",
    "sparse product",
    "attention",
    "head",
    "norm",
    "activation",
    "pointwise",
    "reduction",
    "lookup",
    "copy",
)
STORE_WORK: tuple[Work, ...] = ("update", "receive", "copy", "checksum")
FLASH_WORK: tuple[Work, ...] = ("flash read", "flash write")
PROCESS_WORK: tuple[Work, ...] = ("shared memory", "socket")


class EnginePart(Section):
    """One engine: the device that computes a program's stages."""

    most: int | None = setting(
        None, "engines that the machine can have; null: any number", example=8, ge=1
    )
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
        0.0,
        "time that a call of an operator takes besides its work",
        unit="s",
        example=5e-6,
        ge=0,
        le=LONGEST_SECONDS,
    )
    stage_seconds: float = setting(
        0.0,
        "time that an engine takes per stage and micro-batch besides its operators",
        unit="s",
        example=5e-5,
        ge=0,
        le=LONGEST_SECONDS,
    )
    float32_in_step: float | None = setting(
        None,
        "how long operators take in a step, over their time where each is repeated alone; null: as "
        "long",
        example=0.95,
        gt=0,
        le=LARGEST_RATIO,
    )
    bfloat16_in_step: float | None = setting(
        None, "the same for operators of bfloat16", example=1.2, gt=0, le=LARGEST_RATIO
    )
    rates: tuple[RateCurve, ...] = Field(strict=False, description="speed by kind of work")
    watts: float | None = setting(
        None, "power of one engine while it computes", unit="W", example=700, ge=0
    )
    price: float | None = setting(None, "price of one engine", unit="USD/hour", example=4.9, ge=0)

    @model_validator(mode="after")
    def _check(self) -> EnginePart:
        refuse_all(list(_wrong_curves(self.rates, ENGINE_WORK, ("product", "pointwise"))))
        return self

    @cached_property
    def speed(self) -> RateTable:
        """The engine's rates."""
        return RateTable(self.rates, "engine.rates")

    def in_step(self, dtype: str) -> float:
        """Return how long operators of a type take in a step, over their time alone."""
        ratio = self.bfloat16_in_step if dtype == "bfloat16" else self.float32_in_step
        return 1.0 if ratio is None else ratio


class FlashPart(Section):
    """The disk of the store."""

    size: ByteSize | None = setting(None, "its size; null: not known", example="1TB")
    rates: tuple[RateCurve, ...] = Field(
        strict=False, description="`flash read` and `flash write`, by the bytes of a call"
    )
    both: float | None = setting(
        None,
        "bytes per second of reads and writes together; null: the two do not disturb each other",
        unit="bytes/s",
        example=3e9,
        ge=SLOWEST_RATE,
    )

    @model_validator(mode="after")
    def _check(self) -> FlashPart:
        refuse_all(list(_wrong_curves(self.rates, FLASH_WORK, FLASH_WORK)))
        return self

    @cached_property
    def speed(self) -> RateTable:
        """The disk's rates."""
        return RateTable(self.rates, "store.flash.rates")


class StorePart(Section):
    """The store's host or hosts: memory, optimizer, flash."""

    memory: ByteSize = setting(..., "memory of all hosts of the store", example="24GiB")
    cores: int = setting(1, "processor cores of a host", ge=1)
    rates: tuple[RateCurve, ...] = Field(
        strict=False, description="`update`, `receive`, `copy`, `checksum`"
    )
    flash: FlashPart | None = setting(None, "its disk; null: none")
    watts: float | None = setting(None, "power of the whole store", unit="W", example=500, ge=0)
    price: float | None = setting(
        None, "price of the whole store", unit="USD/hour", example=2.5, ge=0
    )

    @model_validator(mode="after")
    def _check(self) -> StorePart:
        refuse_all(list(_wrong_curves(self.rates, STORE_WORK, ("update",))))
        return self

    @cached_property
    def speed(self) -> RateTable:
        """The store's rates."""
        return RateTable(self.rates, "store.rates")


class LinkPart(Section):
    """The way between the store and an engine; on an engine that is the host there is none."""

    weights: float = setting(
        ..., "bytes per second to one engine", unit="bytes/s", example=12.5e9, ge=SLOWEST_RATE
    )
    gradients: float = setting(
        ..., "bytes per second from one engine", unit="bytes/s", example=12.5e9, ge=SLOWEST_RATE
    )
    store: float | None = setting(
        None,
        "bytes per second that the store sends, and receives, in all; null: no limit",
        unit="bytes/s",
        example=12.5e9,
        gt=0,
    )
    fan_out: int | None = setting(
        None,
        "engines, or further nodes, to which a node of the fabric broadcasts and from which it "
        "reduces; null: the store serves each engine itself",
        example=4,
        ge=2,
    )
    peers: float | None = setting(
        None,
        "bytes per second that one engine exchanges with the others of its host. Each engine then "
        "receives an equal part of the weights from the store and the rest from the others, and "
        "sends an equal part of the summed gradients; null: engines exchange nothing",
        unit="bytes/s",
        example=450e9,
        ge=SLOWEST_RATE,
    )
    seconds: float = setting(
        0.0,
        "latency of one node of the fabric, or of a message",
        unit="s",
        example=2e-5,
        ge=0,
        le=LONGEST_SECONDS,
    )
    value_bytes: int | None = setting(
        None, "bytes of a streamed value; null: those of the program's type", example=4, ge=1
    )

    @model_validator(mode="after")
    def _check(self) -> LinkPart:
        if self.fan_out is not None and self.peers is not None:
            raise refuse(
                "peers",
                "expected null beside fan_out, since weights reach an engine by one way; "
                "remove one of the two",
            )
        return self


class ProcessesPart(Section):
    """Engines and store where both are processes of one host: messages, and shared cores."""

    rates: tuple[RateCurve, ...] = Field(
        strict=False,
        description="`shared memory` and `socket`, one way, by the bytes of a message",
    )
    both: float | None = setting(
        None,
        "bytes per second of both ways together, through shared memory; null: the two do not "
        "disturb each other",
        unit="bytes/s",
        example=6e9,
        ge=SLOWEST_RATE,
    )
    seconds: float = setting(
        0.0,
        "time that a short message takes one way",
        unit="s",
        example=5e-5,
        ge=0,
        le=LONGEST_SECONDS,
    )
    at_once: float | None = setting(
        None,
        "how long two processes that compute at once, each with all cores, take over one after the "
        "other; null: no longer",
        example=1.1,
        gt=0,
        le=LARGEST_RATIO,
    )

    @model_validator(mode="after")
    def _check(self) -> ProcessesPart:
        refuse_all(list(_wrong_curves(self.rates, PROCESS_WORK, PROCESS_WORK)))
        return self

    @cached_property
    def speed(self) -> RateTable:
        """The rates of messages."""
        return RateTable(self.rates, "processes.rates")


class Accuracy(Section):
    """The interval in which nine of ten measured runs lay: measured time over predicted time."""

    low: float = setting(..., "lower end", example=0.9, gt=0, le=LARGEST_RATIO)
    high: float = setting(..., "upper end", example=1.1, gt=0, le=LARGEST_RATIO)
    runs: int = setting(..., "number of measured runs", example=24, ge=1)
    source: str = setting(..., "where they are recorded", example="benchmarks/planner.py")

    @model_validator(mode="after")
    def _check(self) -> Accuracy:
        if self.low > self.high:
            raise refuse(
                "low", f"expected at most high ({self.high:g}), got {self.low:g}; exchange the two"
            )
        return self


class MachineDescription(Section):
    """A machine: one store, equal engines, and the links between them."""

    whole: ClassVar[str] = "machine"

    name: str = setting(..., "short name", example="rack", min_length=1)
    title: str = setting("", "one line about the machine", example="four hosts in one rack")
    kind: Literal["host", "cluster", "wafer"] = setting(..., "kind of machine")
    processor: str | None = setting(
        None, "name of the processor, as the system reports it", example="NVIDIA H100 80GB HBM3"
    )
    engine: EnginePart = setting(..., "one engine")
    store: StorePart = setting(..., "the store")
    link: LinkPart | None = setting(None, "between store and engine; null: they are one processor")
    processes: ProcessesPart | None = setting(
        None, "messages between processes of the host; null: as fast as a copy of the store"
    )
    accuracy: Accuracy | None = setting(None, "how near predictions were; null: never measured")
    sources: dict[str, str] = Field(
        default_factory=dict,
        description="where the figures come from, by key",
        json_schema_extra={"example": {"engine.memory": "data sheet of 2024"}},
    )

    @model_validator(mode="after")
    def _check(self) -> MachineDescription:
        problems = []
        if self.engine.is_host and self.link is not None:
            problems.append(
                refuse(
                    "link",
                    "expected null for an engine that is the host (engine.is_host: true); remove "
                    "link, or set engine.is_host: false",
                )
            )
        if not self.engine.is_host and self.link is None:
            problems.append(
                refuse(
                    "link",
                    "missing; an engine that is not the host needs a link to the store. Add link: "
                    "{weights: ..., gradients: ...} in bytes/s, or set engine.is_host: true",
                )
            )
        if self.engine.is_host and self.engine.memory is not None:
            problems.append(
                refuse(
                    "engine.memory",
                    "expected null for an engine that is the host (engine.is_host: true), which "
                    "computes in store.memory; remove engine.memory, or set engine.is_host: false",
                )
            )
        if not self.engine.is_host and self.engine.memory is None:
            problems.append(
                refuse(
                    "engine.memory",
                    "missing; an engine that is not the host has its own. Add for example "
                    "engine.memory: 40GB, or set engine.is_host: true",
                )
            )
        refuse_all(problems)
        return self


def _wrong_curves(
    curves: Sequence[RateCurve], allowed: Sequence[Work], needed: Sequence[Work]
) -> Iterator[PydanticCustomError]:
    """Yield what is wrong with the curves of one part, whose key is `rates`."""
    seen: dict[tuple[str, str, str], int] = {}
    for number, curve in enumerate(curves):
        if curve.work not in allowed:
            yield refuse(
                f"rates.{number}.work",
                f"expected one of {', '.join(allowed)}, got {curve.work!r}; remove the curve, or "
                "move it to the part that does such work",
            )
        first = seen.setdefault((curve.work, curve.dtype, curve.layout), number)
        if first != number:
            yield refuse(
                f"rates.{number}",
                f"expected one curve of work {curve.work!r}, dtype {curve.dtype!r} and layout "
                f"{curve.layout!r}, got rates[{first}] as well; keep one",
            )
    for work in needed:
        if all(curve.work != work for curve in curves):
            yield refuse(
                "rates",
                f"expected a curve of work {work!r}, got none; add {{work: {work}, rates: [...]}}",
            )
