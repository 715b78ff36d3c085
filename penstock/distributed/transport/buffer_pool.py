"""Receive buffers of a connection, reused when nothing refers to them.

The allocation of new pages takes longer than filling them. A weak reference watches each buffer in
use: the pool reuses a buffer only after the last view of it has ended. The pool does not read
reference counts, because they differ between versions of the interpreter.
"""

import queue
import weakref

import numpy as np

from penstock.distributed.protocol import CHUNK_BYTES

_MOST_BUFFERS = 8  # buffers of one connection
_LEAST_KEPT = 1 << 16  # bytes; below this size new memory is as fast


class BufferPool:
    """The receive buffers of one connection; one thread takes buffers."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._held: dict[int, tuple[weakref.ref[np.ndarray], memoryview]] = {}
        self._next = 0
        # The last view may end in any thread, even during `take`: `SimpleQueue.put` is reentrant.
        self._released: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take(self, size: int) -> np.ndarray:
        """Return `size` bytes of memory that nothing else refers to."""
        if size < _LEAST_KEPT:
            return np.empty(size, np.uint8)
        while not self._released.empty():
            _, memory = self._held.pop(self._released.get())
            self._free.append(memory)
        for index, memory in enumerate(self._free):
            if memory.nbytes >= size:
                return self._hand_out(self._free.pop(index), size)
        if len(self._held) + len(self._free) >= _MOST_BUFFERS:
            return np.empty(size, np.uint8)
        return self._hand_out(np.empty(max(size, CHUNK_BYTES), np.uint8).data, size)

    def _hand_out(self, memory: memoryview, size: int) -> np.ndarray:
        # The base is a memoryview, not an array. So NumPy makes every view of a view refer to this
        # array, and the weak reference ends with the last view.
        payload = np.frombuffer(memory, np.uint8, size)
        number, released = self._next, self._released
        self._next += 1
        self._held[number] = weakref.ref(payload, lambda _: released.put(number)), memory
        return payload
