"""The results of an equal block that the next one gets instead of computing its own."""

import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from penstock.compiler.equal_blocks.records import (
    Metadata,
    NotEqual,
    ResultRef,
    metadata_of,
    storage_of,
)


class ReusedResults:
    """Results of the calls of equal blocks, by their numbers.

    A result that anything outside of its block may see is never reused.
    """

    def __init__(self) -> None:
        self._results: dict[int, Any] = {}

    def get(self, number: int) -> Tensor | None:
        """Return a result; None if the block has to compute it."""
        return self._results.get(number)

    def keep(self, number: int, result: Tensor) -> None:
        """Keep a result for the next block."""
        self._results[number] = result

    def forget_all(self) -> None:
        """Let the next block compute every result."""
        self._results.clear()

    def forget_changed(self, expected: Mapping[int, Metadata]) -> None:
        """Forget results whose metadata the model has changed."""
        self._forget([n for n, t in self._results.items() if not _has(t, expected[n])])

    def forget_shared(self, tensors: Collection[Tensor]) -> None:
        """Forget the results that share memory with some tensors."""
        storages = set(map(storage_of, tensors))
        self._forget([n for n, t in self._results.items() if storage_of(t) in storages])

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self._results[number]

    def referenced(self, objects: dict[Any, Any]) -> list[ResultRef]:
        """Return the results to which more than this object and `objects` refer.

        **Arguments:** `objects` are the tensors of the block that has just ended.
        """
        # An object that only the two containers have calibrates the count of references.
        probe = ResultRef(-1)
        self._results[-1] = objects[probe] = object()
        own = Counter(map(id, [*objects.values(), *self._results.values()]))
        found: dict[ResultRef, int] = {}
        for ref in objects:
            if not isinstance(ref, ResultRef):
                continue
            result = objects[ref]
            # All references from C++ count as one. PyTorch's autograd graph has some of them.
            inside = 1 if ref is not probe and _is_held_by_autograd(result) else 0
            weak = weakref.getweakrefcount(result)
            found[ref] = sys.getrefcount(result) + weak - inside - own[id(result)]
        del result, self._results[-1], objects[probe]
        least = found.pop(probe)
        return [ref for ref, count in found.items() if count > least]


def _has(tensor: Tensor, metadata: Metadata) -> bool:
    try:
        return metadata_of(tensor) == metadata
    except NotEqual:
        return False


def _is_held_by_autograd(tensor: Any) -> bool:
    return hasattr(tensor, "_use_count") and tensor._use_count() > 1
