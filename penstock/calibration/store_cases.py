"""The work of a store as cases: optimizer, arriving gradients, copies, checksums of blocks.

The bytes of an update are those of the weight and its moments, read and written, and of the
gradient, read. The bytes of an arriving gradient are those that are read and those that are kept.
The disk itself is measured by `disk_cases.py`.
"""

import functools
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

from penstock.calibration.repetitions import Case, Prepared, Quantity
from penstock.kernels.memory import allocate
from penstock.program import WeightSpec
from penstock.store import AdamW, Gradients, HeldPart, PartStage
from penstock.store.flash import checksum
from penstock.weight_formats import format_of

_ELEMENTS = (1 << 14, 1 << 18, 1 << 22)  # of a weight
_COPY_BYTES = 64 << 20
_BLOCK_BYTES = (1 << 20, 8 << 20)  # of flash; in the second, memory limits

Kind = Literal["float32", "bfloat16", "8bit"]
KINDS: tuple[Kind, ...] = ("float32", "bfloat16", "8bit")
"""float32 masters and moments; split masters and bfloat16 gradients; float32 masters and moments
of 8 bits."""


def store_cases() -> Iterator[Case]:
    """Yield the cases of a store."""
    for elements in _ELEMENTS:
        for kind in KINDS:
            yield Case(
                Quantity("store", "update", kind),
                functools.partial(prepare_update, kind, elements),
            )
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            yield Case(
                Quantity("store", "receive", name),
                functools.partial(prepare_receive, dtype, elements),
            )
    yield Case(Quantity("store", "copy"), _prepare_copy)
    for size in _BLOCK_BYTES:
        yield Case(Quantity("store", "checksum"), functools.partial(prepare_checksum, size))


def prepare_update(kind: Kind, elements: int) -> Prepared:
    """Return one pass of AdamW over a weight."""
    optimizer = AdamW(moments="8bit" if kind == "8bit" else "fp32")
    weight: tuple[np.ndarray, ...] = (_zeros(elements, "float32"),)
    gradient = _zeros(elements, "float32")
    if kind == "bfloat16":
        weight = (_zeros(elements, "uint16"), _zeros(elements, "uint16"))
        gradient = _zeros(elements, "uint16")
        gradient[:] = 0x3C00  # 1/128 as bfloat16
    else:
        gradient[:] = 1 / 128
    state = {role.name: _zeros(-(-elements // role.group), role.dtype) for role in optimizer.roles}

    def run() -> None:
        optimizer.update(weight, gradient, state, step=1, learning_rate=1e-4, weight_decay=0.1)

    changed = sum(array.nbytes for array in (*weight, *state.values()))
    moved = 2 * changed + gradient.nbytes
    return Prepared(run, moved, moved)


def prepare_receive(dtype: torch.dtype, elements: int) -> Prepared:
    """Return the arrival of a gradient in a store that keeps gradients in a type."""
    spec = WeightSpec("weight", (elements,), format_of(torch.float32), trainable=True)
    stage = PartStage(0, "stage", (spec.name,))
    gradients = Gradients(HeldPart("calibration", (stage,), {spec.name: spec}), dtype)
    arriving = torch.full((elements,), 1 / 128)

    def run() -> None:
        gradients.clear()
        gradients.check(0, [arriving])
        gradients.receive(0, [arriving])
        gradients.report()

    moved = arriving.nbytes + elements * dtype.itemsize
    return Prepared(run, moved, moved)


def _prepare_copy() -> Prepared:
    source, target = (torch.zeros(_COPY_BYTES // 8) for _ in range(2))
    return Prepared(lambda: target.copy_(source), _COPY_BYTES, _COPY_BYTES)


def prepare_checksum(size: int) -> Prepared:
    """Return the checksum of a block on flash, of so many bytes."""
    block = allocate(size)
    return Prepared(lambda: checksum(block), size, size)


def _zeros(elements: int, dtype: str) -> np.ndarray:
    """Return zeros in memory such as a store has."""
    return allocate(elements * np.dtype(dtype).itemsize).view(dtype)
