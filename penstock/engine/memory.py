"""The memory account of an engine: every tensor that it keeps is counted against one budget."""

from collections.abc import Iterable

import torch

from penstock.errors import BudgetError


class MemoryAccount:
    """Counts storages, not tensors: a view of a held tensor costs nothing more.

    `current_bytes` is the present total. `peak_bytes` is the maximum so far, including the memory
    that calls allocate internally. `budget_bytes` None means no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.current_bytes = 0
        self.peak_bytes = 0
        self.peak_at = ""
        self._held: dict[int, tuple[int, int]] = {}

    def hold(self, tensors: Iterable[torch.Tensor | None], what: str) -> None:
        """Count tensors as held for `what` (a stage's name, for messages)."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata if tensor.device.type == "meta" else storage.data_ptr()
            size, count = self._held.get(key, (storage.nbytes(), 0))
            self._held[key] = (size, count + 1)
            if count == 0:
                self.current_bytes += size
        self.peak(0, what)

    def release(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Undo one `hold` of each tensor."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata if tensor.device.type == "meta" else storage.data_ptr()
            size, count = self._held[key]
            if count == 1:
                del self._held[key]
                self.current_bytes -= size
            else:
                self._held[key] = (size, count - 1)

    def reserve(self, size_bytes: int, what: str) -> None:
        """Count bytes without a tensor here, such as sums that are being sent to the store."""
        self.current_bytes += size_bytes
        self.peak(0, what)

    def give_back(self, size_bytes: int) -> None:
        """Undo a reservation."""
        self.current_bytes -= size_bytes

    def peak(self, transient_bytes: int, what: str) -> None:
        """Record that `transient_bytes` more are in use during a call."""
        total = self.current_bytes + transient_bytes
        if total > self.peak_bytes:
            self.peak_bytes, self.peak_at = total, what
        if self.budget_bytes is not None and total > self.budget_bytes:
            raise BudgetError(
                f"stage {what} needs {total:,} bytes on the engine, the budget is "
                f"{self.budget_bytes:,}; raise engine.memory or lower batch.micro"
            )

    def clear(self) -> None:
        """Reset the held bytes after an aborted step; peaks stay."""
        self._held.clear()
        self.current_bytes = 0
