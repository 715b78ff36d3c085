"""Whether to update before the commit, by what the steps before have shown.

A step is speculated only where the caller waited for flash in a step that was not: otherwise there
is nothing to gain. From time to time one step is not speculated, to see whether that is still so.

Within a step, a unit is updated only while the step is not expected to clip. The global norm of the
step is predicted from that of the last step: it has grown as much as the norm of the gradients that
have arrived so far, the last stages'. The prediction must leave a margin to the limit of clipping,
which every wrong guess halves and every right one widens again. How many stages are updated thus
depends on how far the norms of late were from the limit.
"""

import time
from collections.abc import Callable

from penstock.store.flash.guesses import (
    Guess,
    Guesses,
    NoClipping,
    NoGuesses,
    Speculate,
    forced_guesses,
)
from penstock.store.interface import Decision

_LEAST_SHARE = 0.02
"""Assumed: of a step's time that the caller waits for flash, above which updates before the commit
pay. It is not measured."""

_PROBE_EVERY = 64
"""Steps that are speculated before one is not."""

_WIDEST_MARGIN, _NARROWER, _WIDER = 0.64, 0.5, 1.1
"""Of the square of the limit: the square of a norm below which a step is expected not to clip."""


class AdaptiveGuesses:
    """The guesses of one store.

    Args:
        clip_norm: the limit of the global norm; None if nothing is clipped.
        waited: returns the seconds that the caller has waited for flash since the store was opened.
        clock: returns seconds.
    """

    def __init__(
        self,
        clip_norm: float | None,
        waited: Callable[[], float],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._limit = None if clip_norm is None else clip_norm * clip_norm
        self._waited, self._clock = waited, clock
        self._now: dict[int, float] = {}  # squares so far, by stage, of this step
        self._before: dict[int, float] = {}  # of the last step
        self._squares = 0.0  # the square of the global norm of the last step
        self._margin = _WIDEST_MARGIN
        self._share = 0.0  # of the time waited, where nothing was speculated
        self._was_speculated: bool | None = None  # the last step; None if it is not known
        self._in_a_row = 0  # steps that were speculated
        self._since = clock(), waited()

    def of(self, step: int) -> Guess | None:
        """Return the factor 1, if a guess may pay."""
        if self._share < _LEAST_SHARE or self._in_a_row >= _PROBE_EVERY:
            return None
        return Guess()

    def expects(self, stage: int, squares: float) -> bool:
        """Return whether the step is expected not to clip.

        **Arguments:** `squares` is the sum of the squares of the gradients up to this stage's.
        """
        self._now[stage] = squares
        if self._limit is None:
            return True
        before = self._before.get(stage, 0.0)
        return before > 0.0 and self._squares * (squares / before) < self._margin * self._limit

    def decided(self, decision: Decision, was_right: bool | None) -> None:
        """Learn from a step.

        **Arguments:** `was_right` says whether its guess was; None if nothing was speculated.
        """
        if was_right is not None:
            factor = _WIDER if was_right else _NARROWER
            self._margin = min(_WIDEST_MARGIN, factor * self._margin)
        self._before, self._now = self._now, {}
        self._squares = decision.norm * decision.norm
        now = self._clock(), self._waited()
        if self._was_speculated is False:  # its updates were made since its commit
            self._share = (now[1] - self._since[1]) / max(now[0] - self._since[0], 1e-9)
        self._since = now
        self._was_speculated = None if was_right is False else was_right is not None
        self._in_a_row = self._in_a_row + 1 if self._was_speculated else 0


def guesses_of(
    speculate: Speculate, clip_norm: float | None, waited: Callable[[], float]
) -> Guesses:
    """Return the guesses of a setting, or those that a test forces.

    **Raises:** `ConfigError` if the environment names guesses that do not exist.
    """
    if (forced := forced_guesses()) is not None:
        return forced
    if speculate == "auto":
        return AdaptiveGuesses(clip_norm, waited)
    return NoClipping() if speculate == "on" else NoGuesses()
