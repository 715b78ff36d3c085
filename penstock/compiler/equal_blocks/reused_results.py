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
)
from penstock.compiler.tensors import storage_of


class ReusedResults:
    """Results of the calls of equal blocks, by their numbers.

    A result to which the code outside of its block can refer is not reused. Results that share
    memory, and the results of one call, are reused or computed together.
    """

    def __init__(self) -> None:
        self._results: dict[int, Any] = {}
        self._together: dict[int, Collection[int]] = {}  # the results of the same call

    def get(self, number: int) -> Tensor | None:
        """Return a result; None if the block has to compute it."""
        return self._results.get(number)

    def keep(self, results: Mapping[int, Tensor]) -> None:
        """Keep results of a call for the next block."""
        self._results.update(results)
        self._together.update(dict.fromkeys(results, tuple(results)))

    def forget_all(self) -> None:
        """Let the next block compute every result."""
        self._results.clear()

    def forget_changed(self, expected: Mapping[int, Metadata]) -> None:
        """Forget results whose metadata the model has changed."""
        self.forget([t for n, t in self._results.items() if not _has(t, expected[n])])

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Forget the results that share memory with some tensors, and all computed with those."""
        storages = set(map(storage_of, tensors))
        found: set[int] = set()
        while True:
            more = {
                also
                for number, result in self._results.items()
                if storage_of(result) in storages
                for also in self._together[number]
            }
            if more == found:
                break
            found = more
            storages |= {storage_of(self._results[number]) for number in found}
        for number in found:
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
