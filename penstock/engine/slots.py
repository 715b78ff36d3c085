"""How weights reach an engine and gradients leave it.

On the CPU the store's memory is the engine's: weights are read in place. On a GPU a few slots of
device memory, each as large as the largest stage, are filled in turn on a copy stream while the
stage before computes; gradients return on a third stream into page-locked memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from penstock.engine.interface import PendingGradients
from penstock.program import Program
from penstock.tree import TreeNode

_ALIGNMENT = 512  # bytes; what device allocations are aligned to


class WeightSlots(Protocol):
    """The path of weights to the device and of gradients back."""

    def load(self, stage: int, weights: Sequence[torch.Tensor]) -> None: ...

    def use(self, stage: int) -> AbstractContextManager[Sequence[torch.Tensor]]: ...

    def send_back(self, nodes: list[TreeNode]) -> PendingGradients: ...


def make_slots(program: Program, device: torch.device, slots: int) -> WeightSlots:
    """Return the slots that fit a device."""
    return DeviceSlots(program, device, slots) if device.type == "cuda" else InPlace()


class Arrived:
    """Gradients that are in host memory once `event` (None: already) has happened."""

    def __init__(self, nodes: list[TreeNode], event: torch.cuda.Event | None = None) -> None:
        self._nodes = nodes
        self._event = event

    def wait(self) -> list[TreeNode]:
        if self._event is not None:
            self._event.synchronize()
        return self._nodes


class InPlace:
    """Weights are views of the store's memory, used where they are."""

    def __init__(self) -> None:
        self._loaded: dict[int, Sequence[torch.Tensor]] = {}

    def load(self, stage: int, weights: Sequence[torch.Tensor]) -> None:
        self._loaded[stage] = weights

    @contextmanager
    def use(self, stage: int) -> Iterator[Sequence[torch.Tensor]]:
        try:
            yield self._loaded[stage]
        finally:
            del self._loaded[stage]

    def send_back(self, nodes: list[TreeNode]) -> PendingGradients:
        return Arrived(nodes)


class DeviceSlots:
    """`count` slots on a GPU, filled and emptied in turn."""

    def __init__(self, program: Program, device: torch.device, count: int) -> None:
        largest = max(
            sum(_aligned(w.bytes) for w in stage.kind.weights) for stage in program.stages
        )
        self._device = device
        self._slots = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(count)]
        self._free = [torch.cuda.Event() for _ in range(count)]
        self._next = 0
        self._loaded: dict[int, tuple[int, list[torch.Tensor], torch.cuda.Event]] = {}
        self._copy = torch.cuda.Stream(device)
        self._return = torch.cuda.Stream(device)

    def load(self, stage: int, weights: Sequence[torch.Tensor]) -> None:
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        tensors: list[torch.Tensor] = []
        with torch.cuda.stream(self._copy):
            self._copy.wait_event(self._free[slot])
            offset = 0
            for weight in weights:
                place = self._slots[slot][offset : offset + weight.nbytes]
                tensor = place.view(weight.dtype).view(weight.shape)
                tensor.copy_(weight, non_blocking=True)
                tensors.append(tensor)
                offset += _aligned(weight.nbytes)
            ready = torch.cuda.Event()
            ready.record(self._copy)
        self._loaded[stage] = (slot, tensors, ready)

    @contextmanager
    def use(self, stage: int) -> Iterator[Sequence[torch.Tensor]]:
        slot, tensors, ready = self._loaded.pop(stage)
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(ready)
        try:
            yield tensors
        finally:
            self._free[slot] = torch.cuda.Event()
            self._free[slot].record(compute)

    def send_back(self, nodes: list[TreeNode]) -> PendingGradients:
        """Copy the sums to page-locked memory on the return stream; nobody waits yet."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        sent = []
        with torch.cuda.stream(self._return):
            self._return.wait_event(done)
            for node in nodes:
                tensors: list[torch.Tensor | None] = []
                for tensor in node.tensors:
                    if tensor is None:
                        tensors.append(None)
                        continue
                    tensor.record_stream(self._return)
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    host.copy_(tensor, non_blocking=True)
                    tensors.append(host)
                sent.append(TreeNode(node.level, node.index, tuple(tensors)))
            arrived = torch.cuda.Event()
            arrived.record(self._return)
        return Arrived(sent, arrived)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
