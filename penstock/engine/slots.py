"""How weights reach an engine and gradients leave it.

On the CPU the store's memory is the engine's: weights are read in place. On a GPU a few slots of
device memory, each as large as the largest stage, are filled in turn on a copy lane while the
stage before computes; gradients return on a third lane into a ring of page-locked buffers. All
memory is taken in large pieces and used again, never per tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from penstock.collectives import PartialSum
from penstock.engine.interface import PendingGradients
from penstock.engine.lanes import Lanes, Mark
from penstock.engine.sharing import aligned


class WeightSlots(Protocol):
    """The path of weights to the device and of gradients back."""

    resident: Sequence[torch.Tensor]  # device memory that the slots hold all the time
    ahead: int  # stages whose weights may be on their way while another stage computes

    def reset(self) -> None: ...

    def load(self, stage: int, weights: Sequence[torch.Tensor]) -> None: ...

    def use(self, stage: int) -> AbstractContextManager[Sequence[torch.Tensor]]: ...

    def send_back(self, stage: int, nodes: list[PartialSum]) -> PendingGradients: ...


class Arrived:
    """Gradients that are in host memory once `mark` (None: already) was passed."""

    def __init__(self, nodes: list[PartialSum], mark: Mark | None = None) -> None:
        self._nodes: list[PartialSum] | None = nodes
        self._mark = mark

    def wait(self) -> list[PartialSum]:
        """Return the sums; they stay good until their buffer's next turn in the ring."""
        if self._nodes is None:
            raise RuntimeError(
                "these gradients were overwritten by those of a later stage: wait for a stage's "
                "gradients before two more stages send theirs"
            )
        if self._mark is not None:
            self._mark.synchronize()
        return self._nodes

    def overwrite(self) -> None:
        """Note that the buffer is another stage's from now on."""
        self._nodes = None


class InPlace:
    """Weights are views of the store's memory, used where they are."""

    resident: Sequence[torch.Tensor] = ()
    ahead = 0  # nothing moves: the later the weights are asked for, the longer the store has

    def __init__(self) -> None:
        self._loaded: dict[int, Sequence[torch.Tensor]] = {}

    def reset(self) -> None:
        """Forget what was loaded for a step that was given up."""
        self._loaded.clear()

    def load(self, stage: int, weights: Sequence[torch.Tensor]) -> None:
        self._loaded[stage] = weights

    @contextmanager
    def use(self, stage: int) -> Iterator[Sequence[torch.Tensor]]:
        try:
            yield self._loaded[stage]
        finally:
            del self._loaded[stage]

    def send_back(self, stage: int, nodes: list[PartialSum]) -> PendingGradients:
        return Arrived(nodes)


class SlotsInTurn(ABC):
    """`count` slots of `size_bytes` on a device, filled in turn.

    A slot is filled again only behind the computation that read it last; a stage computes only
    behind the copy of its weights. With two slots one stage computes while the next one loads.
    """

    def __init__(self, size_bytes: int, count: int, lanes: Lanes) -> None:
        self._lanes = lanes
        self._slots = [lanes.device_memory(size_bytes) for _ in range(count)]
        self.ahead = count - 1
        self.resident: Sequence[torch.Tensor] = self._slots
        # The memory may have been used on the compute lane before it was ours.
        self._read = [lanes.mark("compute") for _ in range(count)]
        self._next_slot = 0
        self._last_copy: Mark | None = None
        self._loaded: dict[int, tuple[int, list[torch.Tensor], Mark]] = {}

    def reset(self) -> None:
        """Forget what was loaded for a step that was given up."""
        self._loaded.clear()

    def load(self, stage: int, weights: Sequence[torch.Tensor]) -> None:
        """Start copying a stage's weights into the slot whose turn it is.

        The weights must stay where they are until the next load has returned.
        """
        slot = self._next_slot
        for waiting, (taken, _, _) in self._loaded.items():
            if taken == slot:
                raise RuntimeError(
                    f"stage {stage} would overwrite stage {waiting}, which has not computed yet: "
                    f"load at most {len(self._slots)} stages ahead"
                )
        self._next_slot = (slot + 1) % len(self._slots)
        self._lanes.wait("copy", self._read[slot])
        tensors = side_by_side(self._slots[slot], weights)
        self._fill(self._slots[slot], tensors, weights)
        there = self._lanes.mark("copy")
        self._loaded[stage] = (slot, tensors, there)
        if self._last_copy is not None:
            self._last_copy.synchronize()
        self._last_copy = there

    @contextmanager
    def use(self, stage: int) -> Iterator[Sequence[torch.Tensor]]:
        """Hand out a stage's weights to what is queued for computation within the context."""
        slot, tensors, there = self._loaded.pop(stage)
        self._lanes.wait("compute", there)
        try:
            yield tensors
        finally:
            self._read[slot] = self._lanes.mark("compute")

    @abstractmethod
    def _fill(
        self, slot: torch.Tensor, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> None:
        """Queue in the copy lane what brings the weights into the tensors, views of the slot."""


class DeviceSlots(SlotsInTurn):
    """The slots of a device that has its own way to the store, and as many return buffers."""

    def __init__(self, size_bytes: int, count: int, lanes: Lanes) -> None:
        super().__init__(size_bytes, count, lanes)
        self._buffers = [lanes.host_memory(0) for _ in range(count)]
        self._sent: list[Arrived | None] = [None] * count
        self._next_buffer = 0

    def _fill(
        self, slot: torch.Tensor, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> None:
        for tensor, weight in zip(tensors, weights, strict=True):
            self._lanes.copy("copy", tensor, weight)

    def send_back(self, stage: int, nodes: list[PartialSum]) -> PendingGradients:
        """Copy the sums to the host buffer whose turn it is; nobody waits yet."""
        place = self._next_buffer
        self._next_buffer = (place + 1) % len(self._buffers)
        tensors = [t for node in nodes for t in node.tensors if t is not None]
        self._clear_buffer(place, sum(aligned(t.nbytes) for t in tensors))
        self._lanes.wait("return", self._lanes.mark("compute"))
        hosts = iter(side_by_side(self._buffers[place], tensors))
        there = []
        for node in nodes:
            copies: list[torch.Tensor | None] = []
            for tensor in node.tensors:
                if tensor is None:
                    copies.append(None)
                    continue
                host = next(hosts)
                self._lanes.copy("return", host, tensor)
                copies.append(host)
            there.append(PartialSum(node.level, node.index, tuple(copies)))
        arrived = Arrived(there, self._lanes.mark("return"))
        self._sent[place] = arrived
        return arrived

    def _clear_buffer(self, place: int, size_bytes: int) -> None:
        """Take a buffer from the stage that had it; let it grow to the largest stage."""
        before = self._sent[place]
        if before is not None:
            before.overwrite()
        if self._buffers[place].nbytes < size_bytes:
            self._lanes.mark("return").synchronize()  # a copy into the old one may be under way
            self._buffers[place] = self._lanes.host_memory(size_bytes)


def side_by_side(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the shapes and types of `like`, side by side in `memory`."""
    views, offset = [], 0
    for tensor in like:
        part = memory[offset : offset + tensor.nbytes]
        views.append(part.view(tensor.dtype).view(tensor.shape))
        offset += aligned(tensor.nbytes)
    return views
