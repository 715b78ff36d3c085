"""The transfer of weights to an engine and of gradients back.

On the CPU, weights are read in place in the store's memory. On a GPU there are a few slots of
device memory, each as large as the largest stage. They are filled in turn on a copy lane while the
previous stage computes. Gradients return on a third lane into a circular set of page-locked
buffers. All memory is allocated in large blocks and reused, never per tensor. Only the masks of
sparse weights have memory of their own on a GPU, where they stay between stages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch

from penstock.collectives import PartialSum
from penstock.engine.expanded_weights import DeviceMasks, ExpandedWeight
from penstock.engine.interface import PendingGradients
from penstock.engine.lanes import Lanes, Mark
from penstock.engine.sharing import aligned
from penstock.sparsity import SparseWeight, StreamedWeight

PlacedWeight = torch.Tensor | SparseWeight | ExpandedWeight
"""A weight that an engine computes with."""


class WeightSlots(Protocol):
    """The path of weights to the device and of gradients back."""

    resident: Sequence[torch.Tensor]  # device memory that the slots hold permanently
    ahead: int  # stages whose weights may be loading while another stage computes
    expands_sparse: bool  # sparse weights arrive as `ExpandedWeight`

    def reset(self) -> None: ...

    def load(self, stage: int, weights: Sequence[StreamedWeight]) -> None: ...

    def use(self, stage: int) -> AbstractContextManager[Sequence[PlacedWeight]]: ...

    def send_back(self, stage: int, nodes: list[PartialSum]) -> PendingGradients: ...

    def send_losses(self, losses: Sequence[torch.Tensor]) -> Callable[[], list[float]]: ...


Loaded = TypeVar("Loaded")


class Loads(Generic[Loaded]):
    """What has been loaded and is not used yet, in order.

    A stage is in it twice where its weights for the backward are loaded before its forward.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Loaded]] = []

    def __iter__(self) -> Iterator[tuple[int, Loaded]]:
        return iter(self._waiting)

    def add(self, stage: int, loaded: Loaded) -> None:
        """Add what a stage will use."""
        self._waiting.append((stage, loaded))

    def take(self, stage: int) -> Loaded:
        """Remove and return the first that was loaded for a stage.

        Raises:
            KeyError: nothing is loaded for it.
        """
        for place, (waiting, loaded) in enumerate(self._waiting):
            if waiting == stage:
                del self._waiting[place]
                return loaded
        raise KeyError(stage)

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()


class Arrived:
    """Gradients that are in host memory when `mark` is reached (None: already)."""

    def __init__(self, nodes: list[PartialSum], mark: Mark | None = None) -> None:
        self._nodes: list[PartialSum] | None = nodes
        self._mark = mark

    def wait(self) -> list[PartialSum]:
        """Return the sums; they stay valid until their buffer is reused."""
        if self._nodes is None:
            raise RuntimeError(
                "these gradients were overwritten by those of a later stage: wait for a stage's "
                "gradients before two more stages send theirs"
            )
        if self._mark is not None:
            self._mark.synchronize()
        return self._nodes

    def let_wait(self, lanes: Lanes) -> None:
        """Let computation that is queued from now on run after the gradients have been copied."""
        if self._mark is not None:
            lanes.wait("compute", self._mark)

    def overwrite(self) -> None:
        """Record that another stage uses the buffer from now on."""
        self._nodes = None


class InPlace:
    """Weights are views of the store's memory and are used in place."""

    resident: Sequence[torch.Tensor] = ()
    ahead = 0  # nothing is copied: a later request for weights gives the store more time
    expands_sparse = False

    def __init__(self) -> None:
        self._loaded: Loads[Sequence[StreamedWeight]] = Loads()

    def reset(self) -> None:
        """Discard the loads of an aborted step."""
        self._loaded.clear()

    def load(self, stage: int, weights: Sequence[StreamedWeight]) -> None:
        self._loaded.add(stage, weights)

    @contextmanager
    def use(self, stage: int) -> Iterator[Sequence[StreamedWeight]]:
        yield self._loaded.take(stage)

    def send_back(self, stage: int, nodes: list[PartialSum]) -> PendingGradients:
        return Arrived(nodes)

    def send_losses(self, losses: Sequence[torch.Tensor]) -> Callable[[], list[float]]:
        """Return what reads the losses."""
        return lambda: [float(loss) for loss in losses]


class SlotsInTurn(ABC):
    """`count` slots of `size_bytes` on a device, filled in turn.

    A slot is refilled only after the last computation that reads it; a stage computes only after
    the copy of its weights. With two slots, one stage computes while the next one loads. `masks`
    are those of sparse weights, if the device expands these; otherwise the engine gets their masks
    as the store has sent them.
    """

    def __init__(
        self, size_bytes: int, count: int, lanes: Lanes, masks: DeviceMasks | None = None
    ) -> None:
        self._lanes, self._masks = lanes, masks
        self.expands_sparse = masks is not None
        self._slots = [lanes.device_memory(size_bytes) for _ in range(count)]
        self.ahead = count - 1
        self.resident: Sequence[torch.Tensor] = self._slots
        # The memory may have been used on the compute lane before this allocation.
        self._read = [lanes.mark("compute") for _ in range(count)]
        self._next_slot = 0
        self._last_copy: Mark | None = None
        self._loaded: Loads[tuple[int, list[PlacedWeight], Mark]] = Loads()
        self._copied_masks: list[torch.Tensor] = []  # host memory of the copies of the last load
        self._losses = lanes.host_memory(0)

    def reset(self) -> None:
        """Discard the loads of an aborted step; each step fills the same slots in turn."""
        self._loaded.clear()
        self._next_slot = 0

    def load(self, stage: int, weights: Sequence[StreamedWeight]) -> None:
        """Start copying a stage's weights into the next slot.

        The weights must stay valid until the next load has returned.
        """
        slot = self._next_slot
        for waiting, (taken, _, _) in self._loaded:
            if taken == slot:
                raise RuntimeError(
                    f"stage {stage} would overwrite stage {waiting}, which has not computed yet: "
                    f"load at most {len(self._slots)} stages ahead"
                )
        self._next_slot = (slot + 1) % len(self._slots)
        self._lanes.wait("copy", self._read[slot])
        values = [w if isinstance(w, torch.Tensor) else w.values for w in weights]
        tensors = side_by_side(self._slots[slot], values)
        copied: list[torch.Tensor] = []
        placed = [self._place(w, t, copied) for w, t in zip(weights, tensors, strict=True)]
        self._fill(self._slots[slot], tensors, values)
        there = self._lanes.mark("copy")
        self._loaded.add(stage, (slot, placed, there))
        if self._last_copy is not None:
            self._last_copy.synchronize()
        self._last_copy, self._copied_masks = there, copied

    def _place(
        self, weight: StreamedWeight, values: torch.Tensor, copied: list[torch.Tensor]
    ) -> PlacedWeight:
        """Return a weight whose values are in the slot; add to `copied` the host memory of a mask
        that is on its way."""
        if isinstance(weight, torch.Tensor):
            return values
        if self._masks is None:
            return replace(weight, values=values)
        mask, source = self._masks.load(weight)
        if source is not None:
            copied.append(source)
        return ExpandedWeight(weight, values, mask)

    @contextmanager
    def use(self, stage: int) -> Iterator[Sequence[PlacedWeight]]:
        """Provide a stage's weights to computation that is queued within the context."""
        slot, placed, there = self._loaded.take(stage)
        self._lanes.wait("compute", there)
        try:
            yield placed
        finally:
            self._read[slot] = self._lanes.mark("compute")

    def send_losses(self, losses: Sequence[torch.Tensor]) -> Callable[[], list[float]]:
        """Start copying losses that are being computed; return what waits for them, but not for
        computation that is queued later.

        They must be read before those of the next step are sent.
        """
        together = torch.stack(list(losses))
        if self._losses.nbytes != together.nbytes:
            self._lanes.mark("return").synchronize()  # a copy into the memory may be running
            self._losses = self._lanes.host_memory(together.nbytes)
        host = self._losses.view(together.dtype)
        self._lanes.wait("return", self._lanes.mark("compute"))
        self._lanes.copy("return", host, together)
        there = self._lanes.mark("return")

        def read() -> list[float]:
            there.synchronize()
            return host.tolist()

        return read

    @abstractmethod
    def _fill(
        self, slot: torch.Tensor, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> None:
        """Queue, in the copy lane, the copies of the weights into the tensors, which are views of
        the slot."""


class DeviceSlots(SlotsInTurn):
    """The slots of a device with its own link to the store, and as many return buffers."""

    def __init__(
        self, size_bytes: int, count: int, lanes: Lanes, masks: DeviceMasks | None = None
    ) -> None:
        super().__init__(size_bytes, count, lanes, masks)
        self._buffers = [lanes.host_memory(0) for _ in range(count)]
        self._sent: list[Arrived | None] = [None] * count
        self._next_buffer = 0

    def _fill(
        self, slot: torch.Tensor, tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> None:
        for tensor, weight in zip(tensors, weights, strict=True):
            self._lanes.copy("copy", tensor, weight)

    def compute_after(self, sent: Arrived) -> None:
        """Let computation that is queued from now on run after these gradients were copied."""
        sent.let_wait(self._lanes)

    def send_back(self, stage: int, nodes: list[PartialSum]) -> Arrived:
        """Copy the sums to the next host buffer, without waiting."""
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
        """Take the buffer from its previous stage; it grows up to the largest stage."""
        before = self._sent[place]
        if before is not None:
            before.overwrite()
        if self._buffers[place].nbytes < size_bytes:
            self._lanes.mark("return").synchronize()  # a copy into it may be running
            self._buffers[place] = self._lanes.host_memory(size_bytes)


def side_by_side(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return adjacent tensors in `memory` with the shapes and types of `like`."""
    views, offset = [], 0
    for tensor in like:
        part = memory[offset : offset + tensor.nbytes]
        views.append(part.view(tensor.dtype).view(tensor.shape))
        offset += aligned(tensor.nbytes)
    return views
