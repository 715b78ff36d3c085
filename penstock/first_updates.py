"""That every weight trains: checked in a run's beginning, so that none is trained in name only."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import NoTrainingError
from penstock.models import ModelSource
from penstock.store import Store

_NAMED = 5


class FirstUpdates:
    """Looks at all weights after a run's first update; at some adapters' after the second.

    **Arguments:** `notice` is told of weights that are only named.
    """

    def __init__(self, model: ModelSource, notice: Callable[[str], None]) -> None:
        self._notice = notice
        # The gradient of an adapter's A is zero as long as its B is.
        later = frozenset(adapter.down for adapter in model.adapters.values())
        self._excused = [later, frozenset()] if later else [later]

    def check(self, store: Store) -> None:
        """Refuse to go on where a trainable weight got a gradient of nothing but zeros.

        A weight whose update was lost to rounding (a rate still warming up) is only named.

        **Raises:** `NoTrainingError`.
        """
        if not self._excused:
            return
        excused = self._excused.pop(0)
        store.flush()
        still = {name: why for name, why in store.unchanged().items() if name not in excused}
        zero = [name for name, reason in still.items() if "zero" in reason]
        if zero:
            raise NoTrainingError(
                f"{len(zero)} trainable weight(s) did not change in the first step, their gradient "
                f"was zero in every element: {_some(zero)}. Freeze them by name, or see why the "
                "loss does not depend on them."
            )
        if still:
            self._notice(
                f"{len(still)} weight(s) have not changed yet, the update was too small for their "
                f"precision: {_some(list(still))}"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" ..." if len(names) > _NAMED else "")
