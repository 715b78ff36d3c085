"""Decodes the responses of a shard's process from bodies and arrays.

As in `control_messages.py`, an invalid response is a defect, or comes from another version of
Penstock. The receiver refuses it and evicts the node that sent it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.distributed.rpc.commit_codec import report_of
from penstock.distributed.rpc.mask_codec import histograms_of
from penstock.distributed.rpc.rpc import InvalidResponseError, RpcMessage
from penstock.errors import CorruptionError, ProtocolError
from penstock.program import WeightSpec
from penstock.sparsity import (
    Histogram,
    PackedIndex,
    SparseWeight,
    StreamedWeight,
    index_from_compact,
)
from penstock.store import MASTER, VALUES, FlashTraffic, GradientReport, Holding, Stored, Traffic

_TYPES = {
    "float32": torch.float32,
    "uint8": torch.uint8,
    "bfloat16": torch.bfloat16,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "int64": torch.int64,
}
_HASH_DIGITS = 32

T = TypeVar("T")


@dataclass(frozen=True)
class Response:
    """The response of a node to a method call."""

    node: int
    method: str
    content: RpcMessage

    def refuse(self, what: str) -> InvalidResponseError:
        """Return the error for an invalid response."""
        return InvalidResponseError(
            f"node {self.node} sent a response to {self.method!r} that {what}; do all nodes run "
            "the same version of Penstock with the same configuration?"
        )

    def get(self, key: str, is_right: Callable[[Any], bool]) -> Any:
        """Return a value of the body; raises if the value is invalid."""
        value = self.content.body.get(key)
        if not is_right(value):
            raise self.refuse(f"has {str(value)[:40]!r} as {key!r}, an invalid value")
        return value

    def array(self, key: str, kind: np.dtype[Any], count: int) -> np.ndarray:
        """Return a flat array of `count` values of a type."""
        array = self.content.arrays.get(key)
        if array is None:
            raise self.refuse(f"has no array {key!r}")
        if array.dtype != kind or array.size != count:
            raise self.refuse(
                f"has {array.size:,} values of {array.dtype} as {key!r}, expected {count:,} of "
                f"{kind}"
            )
        return array.reshape(-1)


@dataclass(frozen=True)
class Opened:
    """A store's answer to `open`: the bytes that the store needs, and whether the store is new."""

    memory_bytes: Mapping[str, int]
    flash_bytes: int
    flash_rule: FlashTraffic
    is_new: bool

    @classmethod
    def read(cls, answer: Response) -> Opened:
        """Return the content of the response to `open`."""
        read, written = answer.get("flash_rule", _pair_of(_is_count))
        return cls(
            answer.get("memory_bytes", _mapping_to(_is_count)),
            answer.get("flash_bytes", _is_count),
            FlashTraffic(read, written),
            answer.get("is_new", _is_bool),
        )


@dataclass(frozen=True)
class Status:
    """The durable step of a store on flash, and the data stored with the current step."""

    is_new: bool
    durable_step: int | None
    extra: Mapping[str, Any]

    @classmethod
    def read(cls, answer: Response) -> Status:
        """Return the content of the response to `status`."""
        return cls(
            answer.get("is_new", _is_bool),
            answer.get("durable_step", lambda step: step is None or _is_count(step)),
            answer.get("extra", lambda extra: isinstance(extra, dict)),
        )


def step_of(answer: Response) -> int | None:
    """Return the current step of a store; None after it is closed."""
    return None if answer.method == "close" else answer.get("step", _is_count)


def nothing(answer: Response) -> None:
    """Accept a response without a result."""


def at(answer: Response, step: int) -> None:
    """Require that a store is at a step."""
    if step_of(answer) != step:
        raise answer.refuse(f"names step {step_of(answer)}, expected step {step}")


def weights_of(answer: Response, specs: Sequence[WeightSpec]) -> list[StreamedWeight]:
    """Return the requested weights, in memory of their own."""
    weights: list[StreamedWeight] = []
    for number, spec in enumerate(specs):
        kind = np.dtype(spec.format.stream.dtype)
        if spec.is_sparse:
            weights.append(_sparse_weight(answer, number, spec, kind))
            continue
        array = answer.array(str(number), kind, spec.elements)
        weights.append(torch.from_numpy(array).view(spec.stream_dtype).view(spec.shape))
    return weights


def _sparse_weight(
    answer: Response, number: int, spec: WeightSpec, kind: np.dtype[Any]
) -> SparseWeight:
    kept, version, asks = answer.get(f"mask {number}", _is_mask)
    array = answer.array(str(number), kind, kept)
    index = mask(answer, f"mask {number}", spec, kept)
    values = torch.from_numpy(array).view(spec.stream_dtype)
    return SparseWeight(spec.name, spec.shape, values, index, version, asks)


def mask(answer: Response, key: str, spec: WeightSpec, kept: int) -> PackedIndex:
    """Return the mask in an array of bytes."""
    data = answer.content.arrays.get(key)
    if data is None or data.dtype != np.uint8:
        raise answer.refuse(f"has no mask {key!r}")
    try:
        return index_from_compact(data.tobytes(), spec.elements, kept, spec.begin)
    except (CorruptionError, ValueError) as error:
        raise answer.refuse(f"has a damaged mask of {spec.name}: {error}") from None


def values_of(answer: Response, kind: torch.dtype, count: int) -> np.ndarray:
    """Return `count` values of a weight, or of its state."""
    wanted = next(np.dtype(name) for name, known in _TYPES.items() if known is kind)
    return answer.array("values", wanted, count)


def report(answer: Response, holding: Holding) -> GradientReport:
    """Return the report on a step's gradients."""
    content = _read(answer, report_of)
    stages = {*content.silent, *(content.non_finite or {})}
    if not stages <= {*range(len(holding.stages))}:
        raise answer.refuse(f"names stages {sorted(stages)[:8]} of {len(holding.stages)}")
    named = (*content.missing, *(n for names in (content.non_finite or {}).values() for n in names))
    _require_known(answer, (*named, *content.zero), holding)
    return content


def histograms(answer: Response, elements: Sequence[int]) -> list[Histogram]:
    """Return the histograms; each counts at most so many entries."""
    try:
        return histograms_of(answer.content.arrays.get("histograms"), elements)
    except ProtocolError as error:
        raise answer.refuse(f"has invalid histograms: {error}") from None


def unchanged(answer: Response, holding: Holding) -> tuple[str, ...]:
    """Return the weights that no update has changed."""
    content = answer.get("unchanged", _is_names)
    _require_known(answer, content, holding)
    return tuple(content)


def traffic(answer: Response) -> Traffic:
    """Return the bytes streamed and received, and the seconds waited."""
    streamed, received = answer.get("bytes", _pair_of(_is_count))
    updates, snapshots = answer.get("seconds", _pair_of(_is_seconds))
    return Traffic(streamed, received, float(updates), float(snapshots))


def flash_traffic(answer: Response) -> FlashTraffic:
    """Return the bytes moved to and from flash, the seconds waited, and what was speculated."""
    read, written = answer.get("moved", _pair_of(_is_count))
    adopted, discarded = answer.get("speculated", _pair_of(_is_count))
    seconds = float(answer.get("seconds", _is_seconds))
    return FlashTraffic(read, written, seconds, adopted, discarded)


def roles(answer: Response, spec: WeightSpec) -> dict[str, Stored]:
    """Return what is stored of a weight: its master in the weight's shape, then its state."""
    content = answer.get("roles", _mapping_to(_is_stored))
    found = {role: Stored(_TYPES[kind], tuple(shape)) for role, (kind, shape) in content.items()}
    if spec.is_sparse:
        values = found.get(VALUES)
        if values is None or values.dtype != spec.format.saved_dtype or len(values.shape) != 1:
            raise answer.refuse(f"has invalid roles of {spec.name}: {str(content)[:80]!r}")
        return found
    most = max((math.prod(stored.shape) for stored in found.values()), default=0)
    if (
        found.get(MASTER) != Stored(spec.format.saved_dtype, tuple(spec.shape))
        or most > spec.elements
    ):
        raise answer.refuse(f"has invalid roles of {spec.name}: {str(content)[:80]!r}")
    return found


def content_hash(answer: Response) -> str:
    """Return the hash of all weights."""
    return answer.get("hash", lambda found: isinstance(found, str) and len(found) == _HASH_DIGITS)


def _read(answer: Response, read: Callable[[Mapping[str, Any]], T]) -> T:
    try:
        return read(answer.content.body)
    except ProtocolError as error:
        raise InvalidResponseError(
            f"node {answer.node} sent an invalid response to {answer.method!r}: {error}"
        ) from None


def _require_known(answer: Response, names: Collection[str], holding: Holding) -> None:
    unknown = [name for name in names if name not in holding.weights]
    if unknown:
        raise answer.refuse(f"names a weight {unknown[0][:40]!r} that the shard does not hold")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_mask(value: Any) -> bool:
    match value:
        case [int(kept), int(version), bool()]:
            return kept >= 0 and version >= 0
    return False


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_stored(value: Any) -> bool:
    match value:
        case [str(kind), list(shape)]:
            return kind in _TYPES and all(map(_is_count, shape))
    return False


def _pair_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == 2 and all(map(is_right, value))


def _mapping_to(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_right, value.values()))
