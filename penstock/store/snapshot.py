"""The state of one step, read while the store continues with later steps.

A snapshot of step k is taken directly after the updates of step k, which the forward sweep applies
anyway. Data that is still unread when the update of step k+1 is about to overwrite it is copied
first. Copies stay within a byte budget. If the budget is used up, the update waits for the reader,
so a slow disk costs time and never memory.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from penstock.errors import StorageError
from penstock.kernels.memory import allocate
from penstock.spans import Spans
from penstock.store.codecs import decode
from penstock.store.holding import Holding
from penstock.store.roles import Stored, holds_weight
from penstock.weight_formats import DENSE

Parts = tuple[np.ndarray, ...]
"""The memory of a tensor: one array, or the parts of a weight in its format."""

Tensor = tuple[str, str]
"""A weight's name and a role."""


class Snapshot:
    """The state after one step. The store calls `preserve` before, and `updated` after, an update.

    `pieces` and `close` are for one reader in its own thread; the other methods are for the store.

    Args:
        program: names the weights.
        step: the step of this state, the newest that the store has committed.
        tensors: type and shape of every weight's master and state, by name.
        memory: returns the memory of a tensor, which updates overwrite.
        awaited: weights whose update of this step is pending.
        buffer_bytes: most that copies may take at any time.
        spans: measure for how long copies and waits delay updates.
    """

    def __init__(
        self,
        program: Holding,
        step: int,
        tensors: Mapping[str, Mapping[str, Stored]],
        memory: Callable[[str, str], Parts],
        awaited: Collection[str],
        buffer_bytes: int,
        spans: Spans,
    ) -> None:
        self.program = program
        self.step = step
        self.copied_bytes = self.peak_copied_bytes = 0
        self._tensors = tensors
        self._memory = memory
        self._awaited = set(awaited)
        self._buffer_bytes = buffer_bytes
        self._unread = {
            (name, role)
            for name, roles in tensors.items()
            for role in roles
            if program.weights[name].elements
        }
        self._reading: Tensor | None = None
        self._copies: dict[Tensor, Parts] = {}
        self._is_closed = False
        self._spans = spans
        self._changed = threading.Condition()

    # For the reader

    def roles(self, name: str) -> Mapping[str, Stored]:
        """Return the arrays of a weight: its master, then its state."""
        return self._tensors[name]

    def pieces(self, name: str, role: str, piece_elements: int) -> Iterator[np.ndarray]:
        """Yield a tensor, flat, in pieces; each piece is valid until the next is requested.

        Each tensor is read once; it may be overwritten afterwards.

        Raises:
            StorageError: the snapshot was abandoned.
        """
        tensor = name, role
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or name not in self._awaited)
            self._reading = tensor
            memory = self._copies.get(tensor) or self._memory(name, role)
        weight_format = self.program.weights[name].format if holds_weight(role) else DENSE
        try:
            for begin in range(0, memory[0].size, piece_elements):
                end = min(begin + piece_elements, memory[0].size)
                yield decode(weight_format, memory, begin, end)
                if self._is_closed:  # checked after use: an update may have overwritten it
                    raise StorageError(f"the snapshot of step {self.step} was abandoned")
        finally:
            with self._changed:
                self._reading = None
                self._unread.discard(tensor)
                self.copied_bytes -= sum(part.nbytes for part in self._copies.pop(tensor, ()))
                self._changed.notify_all()

    def close(self) -> None:
        """Release the snapshot: updates no longer wait, and unread data is lost."""
        with self._changed:
            self._is_closed = True
            self._copies.clear()
            self.copied_bytes = 0
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether the snapshot no longer delays any update."""
        return self._is_closed

    # For the store

    def preserve(self, name: str, step: int) -> None:
        """Wait until step `step`'s update may overwrite a weight and its state."""
        if step <= self.step:
            return
        with self._spans.span("snapshot", name, step=step), self._changed:
            while not self._is_closed:
                waiting = [t for t in self._unread - self._copies.keys() if t[0] == name]
                if not waiting:
                    break
                if self._reading not in waiting and self._copy(waiting):
                    break
                self._changed.wait()

    def updated(self, name: str) -> None:
        """Record that a weight has been updated to this step or a later one."""
        with self._changed:
            self._awaited.discard(name)
            self._changed.notify_all()

    def _copy(self, tensors: Collection[Tensor]) -> bool:
        """Copy tensors if they fit into the budget; return whether they did."""
        memory = {tensor: self._memory(*tensor) for tensor in tensors}
        need = sum(part.nbytes for parts in memory.values() for part in parts)
        if self.copied_bytes + need > self._buffer_bytes:
            return False
        for tensor, parts in memory.items():
            self._copies[tensor] = tuple(_copy_of(part) for part in parts)
        self.copied_bytes += need
        self.peak_copied_bytes = max(self.peak_copied_bytes, self.copied_bytes)
        return True


def _copy_of(part: np.ndarray) -> np.ndarray:
    """Return a copy whose pages return to the system when it is freed."""
    copy = allocate(part.nbytes).view(part.dtype)
    copy[:] = part
    return copy
