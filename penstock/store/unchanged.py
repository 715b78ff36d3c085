"""Which trainable weights no update has changed yet, and why: no run trains nothing unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import xxhash

from penstock.kernels.split_master import Weight

ZERO_GRADIENT = "its gradient was zero in every element"


class UnchangedWeights:
    """The account of one store, over the updates since its weights were loaded or restored.

    Only updates with a learning rate above zero count.

    Args:
        trainable: the weights that are to change, by name.
        is_gradient_zero: tells of a weight whether its gradient is zero in every element.
    """

    def __init__(self, trainable: Collection[str], is_gradient_zero: Callable[[str], bool]) -> None:
        self._trainable, self._is_gradient_zero = trainable, is_gradient_zero
        self.begin()

    def begin(self) -> None:
        """Forget all updates."""
        self._never_changed = set(self._trainable)
        self._reasons: dict[str, str] = {}

    @contextmanager
    def watching(self, name: str, weight: Weight, learning_rate: float) -> Iterator[None]:
        """Note whether the update within changes the memory of a weight, or of a part of it."""
        if name not in self._never_changed or learning_rate <= 0 or not weight[0].size:
            yield
            return
        before = _digests(weight)
        yield
        if _digests(weight) != before:
            self._never_changed.discard(name)
            self._reasons.pop(name, None)
        elif self._is_gradient_zero(name):
            self._reasons[name] = ZERO_GRADIENT
        else:
            self._reasons[name] = f"no update was large enough, at learning rate {learning_rate:g}"

    def reasons(self) -> dict[str, str]:
        """Return why, of the weights that were updated and are in every bit what they were."""
        return {name: self._reasons[name] for name in self._trainable if name in self._reasons}


def reason_of_pieces(reasons: Sequence[str | None]) -> str | None:
    """Return why a weight has not changed whose pieces have these reasons; None if one has."""
    if None in reasons:
        return None
    # A gradient is zero everywhere only if it is so in every piece.
    return next((reason for reason in reasons if reason != ZERO_GRADIENT), ZERO_GRADIENT)


def _digests(weight: Weight) -> list[bytes]:
    return [xxhash.xxh3_128_digest(part.data) for part in weight]
