"""The record of a block: its operator calls, and what they read and return."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CALL = "call_of_block"  # meta key of a node of a first block: the record's and the call's index
BLOCK = "equal_block"  # meta key of the node of an equal block: its index in `BlockTracing.equal`

# What a shape rule or the code of a model can read of a tensor without data, but its identity.
Metadata = tuple[Any, ...]
# The modules of a call below its block: key in the tracer, path and class of each, relative.
ModulesBelow = tuple[tuple[str, str, type], ...]


class NotEqual(Exception):
    """A call of a block cannot be recorded, or differs from the record."""


@torch.library.custom_op("penstock::equal_block", mutates_args=())
def equal_block(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Stand for the operators of a block until they are copied; never run."""
    raise AssertionError("an equal block was not expanded")


@dataclass(frozen=True)
class ResultRef:
    """A tensor that a block computes; `number` counts the results of its calls."""

    number: int


@dataclass(frozen=True)
class ExternalRef:
    """A tensor from outside of a block; `number` counts them in the order of their first use."""

    number: int


TensorRef = ResultRef | ExternalRef


@dataclass(frozen=True)
class OperatorCall:
    """An operator call of a block.

    Attributes:
        target: the operator.
        args: positional arguments, with a `TensorRef` for every tensor.
        kwargs: keyword arguments, likewise.
        inputs: the metadata of the tensors in `args` and `kwargs`.
        results: the results, with a `ResultRef` for every tensor.
        outputs: the metadata of the tensors in `results`.
        returned_arguments: for each tensor in `results`, the argument that it is, if any.
        with_gradients: whether autograd is on.
        modules: the modules of the call below the block.
        line: the line of the model's code, as in `stack_trace` of a node.
    """

    target: Any
    args: Any
    kwargs: Any
    inputs: tuple[Metadata, ...]
    results: Any
    outputs: tuple[Metadata, ...]
    returned_arguments: tuple[TensorRef | None, ...]
    with_gradients: bool
    modules: ModulesBelow
    line: str | None


@dataclass
class BlockRecord:
    """The operator calls of the first block of a group.

    `storages` has, for each external tensor, the first one that shares its memory. `autocast` is
    whether it was on at the start of the block.
    """

    index: int
    autocast: bool
    calls: list[OperatorCall] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class EqualBlock:
    """A block with the calls of a record; its node returns `outputs`."""

    record: BlockRecord
    outputs: tuple[ResultRef, ...]


def refs_in(value: Any) -> Iterator[Any]:
    """Yield the `TensorRef`s in recorded arguments or results, in their order."""
    if isinstance(value, (ResultRef, ExternalRef)):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from refs_in(part)
    elif isinstance(value, dict):
        yield from refs_in(tuple(value.values()))


def with_refs_replaced(value: Any, replacements: Any) -> Any:
    """Return recorded arguments or results with `replacements[ref]` for every `TensorRef`."""
    if isinstance(value, (ResultRef, ExternalRef)):
        return replacements[value]
    if type(value) in (tuple, list):
        return type(value)(with_refs_replaced(part, replacements) for part in value)
    if type(value) is dict:
        return {name: with_refs_replaced(part, replacements) for name, part in value.items()}
    return value


def metadata_of(tensor: Tensor) -> Metadata:
    """Return the metadata of a tensor.

    Raises:
        NotEqual: the tensor has no strides, or is lazily conjugated or negated.
    """
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise NotEqual
    return (
        type(tensor),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.is_inference(),
        tensor._is_view(),
        len(vars(tensor)),  # attributes that the model's code has set
    )


def is_autocast_enabled() -> bool:
    """Return whether autocast is on for any device that a model may use."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
