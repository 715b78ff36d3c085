"""The record of a block: its operator calls, and what they read and return."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

FIRST = "operator_of_block"  # meta key of a first block's node: its block and its call
EQUAL = "equal_block"  # meta key of the node of an equal block: its index in `BlockTracing.equal`


class NotEqual(Exception):
    """A block differs from the first one of its kind; the capture must begin again without it."""


@torch.library.custom_op("penstock::equal_block", mutates_args=())
def equal_block(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Stand for the operators of a block until they are copied; never run."""
    raise AssertionError("an equal block was not expanded")


@dataclass(frozen=True)
class TensorRef:
    """A tensor of a block: result `number`, or external tensor `~number` if it is negative."""

    number: int


@dataclass(frozen=True)
class Call:
    """An operator call of a block.

    Tensors in the arguments and results are `TensorRef`. `metadata` describes the results. `same`
    has, for each result, the number that this tensor object had before if the operator returned
    one of its arguments.
    """

    target: Any
    args: Any
    kwargs: Any
    results: Any
    metadata: tuple[Any, ...]
    same: tuple[int | None, ...]
    with_gradients: bool


@dataclass
class FirstBlock:
    """The record of the first block of a kind.

    `externals` are the metadata of the tensors from outside. `autocast` is whether it was on at the
    start. `results` are the results of a later block, by number; the calls of all equal blocks
    return them. A result that is an argument of its operator is None.
    """

    index: int
    autocast: bool
    calls: list[Call] = field(default_factory=list)
    externals: list[tuple[Any, ...]] = field(default_factory=list)
    results: list[Tensor | None] = field(default_factory=list)


@dataclass(frozen=True)
class EqualBlock:
    """An equal block: its first block, and the numbers of the results that its node returns."""

    first: FirstBlock
    outputs: tuple[int, ...]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def tensor_refs(tree: Any) -> Iterator[TensorRef]:
    """Yield the tensors in the recorded arguments or results of a call, in their order."""
    if isinstance(tree, TensorRef):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from tensor_refs(part)
    elif isinstance(tree, dict):
        yield from tensor_refs(tuple(tree.values()))


def metadata_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that a shape rule or the model's code can read of a tensor without data.

    Raises:
        NotEqual: the tensor has no strides.
    """
    if tensor.layout != torch.strided:
        raise NotEqual
    return (
        type(tensor) is FakeTensor,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        len(vars(tensor)),  # attributes that the model's code has set
    )


def storage_of(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor while it exists."""
    return int(tensor.untyped_storage()._cdata)
