"""How long the engines of a run have computed in a step, from what they say with their beats."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.distributed.control_messages import Figures


class Computing:
    """Divides what engines have computed over the steps.

    A beat is up to a tenth of a second old: what it does not say yet counts for the next step, so
    that the sum over a run is right where single steps are not exact.
    """

    def __init__(self) -> None:
        self._before: dict[int, float] = {}
        self._left = 0.0  # computed in steps that had fewer seconds

    def of_step(self, said: Mapping[int, Figures], seconds: float) -> float:
        """Return in how many seconds of a step its slowest engine has computed.

        Args:
            said: by the engines of the step.
            seconds: the length of the step.
        """
        new = [each.computed - self._before.get(engine, 0.0) for engine, each in said.items()]
        self._before = {engine: each.computed for engine, each in said.items()}
        computed = self._left + max(new, default=0.0)
        self._left = max(0.0, computed - seconds)
        return min(computed, seconds)
