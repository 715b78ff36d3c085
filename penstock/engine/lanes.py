"""The queues of a device as an engine sees them: it computes in one, and copies in two others.

What is queued in one lane happens in order; lanes run side by side unless one waits for a mark in
another. `slots.py` says who waits for whom, and is tested with lanes of another make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from penstock.kernels.memory import allocate, page_lock

Lane = Literal["compute", "copy", "return"]


class Mark(Protocol):
    """A place in a lane."""

    def synchronize(self) -> None:
        """Return when all that was queued in the lane before the mark is done."""
        ...


class Lanes(Protocol):
    """Three queues, and memory at both ends of the copies."""

    def device_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes] on the device."""
        ...

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes] in host memory that the device can write by itself."""
        ...

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy; the source may be let go of right away where it lies on the device."""
        ...

    def queue(self, lane: Lane, action: Callable[[], Any]) -> None:
        """Queue what an action does on the device; a lane of another make may act on its result."""
        ...

    def mark(self, lane: Lane) -> Mark:
        """Mark the end of what is queued in a lane now."""
        ...

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Let what is queued in a lane from now on happen after the mark."""
        ...


class CudaLanes:
    """Streams of one CUDA device; computation is queued in the caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = {"copy": torch.cuda.Stream(device), "return": torch.cuda.Stream(device)}

    def device_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes] on the device, not given back while a lane still uses it."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        for stream in self._copies.values():
            memory.record_stream(stream)
        return memory

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes], page-locked where the system allows it (else it is slower)."""
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
        """Let an action queue what it does in the lane's stream."""
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


class _Passed:
    """A mark where everything is done as soon as it is queued."""

    def synchronize(self) -> None:
        """Return at once."""


class HostLanes:
    """The lanes of a CPU that stands for a device: what is queued is done at once."""

    def device_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes]."""
        return torch.from_numpy(allocate(size_bytes))

    def host_memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 [size_bytes]."""
        return torch.from_numpy(allocate(size_bytes))

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def queue(self, lane: Lane, action: Callable[[], Any]) -> None:
        """Act."""
        action()

    def mark(self, lane: Lane) -> Mark:
        """Return a mark that has been passed."""
        return _Passed()

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Nothing is ever on its way."""
