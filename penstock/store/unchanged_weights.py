"""Detects trainable weights that no update has changed, because updates are lost to rounding."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import xxhash

from penstock.kernels.split_master import Weight


class UnchangedWeights:
    """The record of one store, over the updates since its weights were loaded or restored.

    Only updates with a learning rate above zero count.

    Args:
        trainable: the weights that must change, by name.
    """

    def __init__(self, trainable: Collection[str]) -> None:
        self._trainable = trainable
        self.begin()

    def begin(self) -> None:
        """Forget all updates."""
        self._never_changed = set(self._trainable)
        self._updated: set[str] = set()
        self.mark()

    def mark(self) -> None:
        """Keep the present record, for `go_back`."""
        self._marked = set(self._never_changed), set(self._updated)

    def go_back(self) -> None:
        """Forget the updates since `mark`."""
        never_changed, updated = self._marked
        self._never_changed, self._updated = set(never_changed), set(updated)

    @contextmanager
    def watching(self, name: str, weight: Weight, learning_rate: float) -> Iterator[None]:
        """Record whether the update inside the block changes the memory of a weight, or of a part
        of it."""
        if name not in self._never_changed or learning_rate <= 0 or not weight[0].size:
            yield
            return
        before = _digests(weight)
        yield
        self._updated.add(name)
        if _digests(weight) != before:
            self._never_changed.discard(name)

    def names(self) -> tuple[str, ...]:
        """Return the weights that were updated and have kept every bit."""
        still = self._never_changed & self._updated
        return tuple(name for name in self._trainable if name in still)


def _digests(weight: Weight) -> list[bytes]:
    return [xxhash.xxh3_128_digest(part.data) for part in weight]
