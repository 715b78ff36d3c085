"""The queues of a device: an engine computes in one lane and copies in two others.

Operations in one lane run in order. Lanes run concurrently unless one waits for a mark in another.
`slots.py` defines which lane waits for which; its tests use other implementations of lanes.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from penstock.kernels.memory import allocate, page_lock

Lane = Literal["compute", "copy", "return"]


class Mark(Protocol):
    """A position in a lane."""

    def synchronize(self) -> None:
        """Wait until all operations queued in the lane before the mark have completed."""
        ...


class Lanes(Protocol):
    """Three queues, and memory at both ends of the copies."""

    def device_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes] on the device."""
        ...

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes] in host memory that the device can write directly."""
        ...

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy; a source in device memory may be freed at once."""
        ...

    def queue(self, lane: Lane, action: Callable[[], Any]) -> None:
        """Queue the device operations of an action; a lane without a device may act on its
        result."""
        ...

    def mark(self, lane: Lane) -> Mark:
        """Mark the present end of a lane's queue."""
        ...

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Let all operations queued in a lane from now on run after the mark."""
        ...


class CudaLanes:
    """Streams of one CUDA device; computation is queued in the caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = {"copy": torch.cuda.Stream(device), "return": torch.cuda.Stream(device)}

    def device_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes] on the device; it is not reused while a lane still uses it."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        for stream in self._copies.values():
            memory.record_stream(stream)
        return memory

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes], page-locked if the system allows it (otherwise copies are
        slower)."""
        memory = allocate(size_bytes)
        page_lock(memory)
        return torch.from_numpy(memory)

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between host and device."""
        stream = self._stream(lane)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        if source.is_cuda:
            source.record_stream(stream)

    def queue(self, lane: Lane, action: Callable[[], Any]) -> None:
        """Queue an action's operations in the lane's stream."""
        with torch.cuda.stream(self._stream(lane)):
            action()

    def mark(self, lane: Lane) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Let a stream wait for an event."""
        assert isinstance(mark, torch.cuda.Event)
        self._stream(lane).wait_event(mark)

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._copies.get(lane) or torch.cuda.current_stream(self._device)


class _ReachedMark:
    """A mark in a lane whose operations complete as they are queued."""

    def synchronize(self) -> None:
        """Return at once."""


class HostLanes:
    """The lanes of a CPU that simulates a device: operations complete as they are queued."""

    def device_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes]."""
        return torch.from_numpy(allocate(size_bytes))

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes]."""
        return torch.from_numpy(allocate(size_bytes))

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once."""
        target.copy_(source)

    def queue(self, lane: Lane, action: Callable[[], Any]) -> None:
        """Execute at once."""
        action()

    def mark(self, lane: Lane) -> Mark:
        """Return a mark that has already been reached."""
        return _ReachedMark()

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Do nothing: no operation is pending."""
