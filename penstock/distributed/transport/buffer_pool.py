"""Memory for what comes over a link, used again when nobody has it any more.

New pages take longer to come by than to fill. What is handed out is watched by a weak reference:
as long as any view of it is alive, whoever holds that, it is not handed out again. References are
not counted, since what an interpreter counts changes from version to version.
"""

from __future__ import annotations

import queue
import weakref

import numpy as np

from penstock.distributed.protocol import CHUNK_BYTES

_MOST = 8  # kept by one link
_LEAST_KEPT = 1 << 16  # bytes; below it new memory is as cheap


class BufferPool:
    """The memory of one link; one thread takes of it."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._held: dict[int, tuple[weakref.ref[np.ndarray], memoryview]] = {}
        self._next = 0
        # A view may end in any thread, also in the middle of what follows: put is reentrant.
        self._gone: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take(self, size: int) -> np.ndarray:
        """Return so many bytes that nobody else sees."""
        if size < _LEAST_KEPT:
            return np.empty(size, np.uint8)
        while not self._gone.empty():
            _, memory = self._held.pop(self._gone.get())
            self._free.append(memory)
        for place, memory in enumerate(self._free):
            if memory.nbytes >= size:
                return self._hand_out(self._free.pop(place), size)
        if len(self._held) + len(self._free) >= _MOST:
            return np.empty(size, np.uint8)
        return self._hand_out(np.empty(max(size, CHUNK_BYTES), np.uint8).data, size)

    def _hand_out(self, memory: memoryview, size: int) -> np.ndarray:
        # Made of what is no array: views of its views hold this one, not what is behind it.
        payload = np.frombuffer(memory, np.uint8, size)
        number, gone = self._next, self._gone
        self._next += 1
        self._held[number] = weakref.ref(payload, lambda _: gone.put(number)), memory
        return payload
