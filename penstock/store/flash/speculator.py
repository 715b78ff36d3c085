"""Lets the units of one flash store be updated before the commit, by the decision that is expected.

The expected decision has the learning rate of the schedule and a guessed clip factor. It is of use
if the commit decides by the same two numbers. The norm of the gradients that have arrived so far is
a lower bound of the global norm: once it is above the limit of clipping, the step certainly clips,
and the speculative updates are thrown away at once.
"""

import math
from collections.abc import Sequence

from penstock.store.commit import CommitRule
from penstock.store.flash.block_updates import BlockUpdates
from penstock.store.flash.guesses import Guess, Guesses
from penstock.store.flash.layout import Unit
from penstock.store.flash.pipeline import Pipeline
from penstock.store.flash.speculation import is_speculative
from penstock.store.gradients import Gradients
from penstock.store.interface import Decision
from penstock.store.learning_rate_schedules import learning_rate
from penstock.store.masks import Masks


class Speculator:
    """Called by the thread of the store's caller.

    Args:
        guesses: the clip factors to expect.
        rule: gives the learning rates, and the limit of the norm.
        gradients: those that have arrived.
        updates: computes the updates.
        pipeline: makes them.
        masks: say which steps change masks.
        durable_every: one of every so many steps is durable.
    """

    def __init__(
        self,
        guesses: Guesses,
        rule: CommitRule,
        gradients: Gradients,
        updates: BlockUpdates,
        pipeline: Pipeline,
        masks: Masks,
        durable_every: int,
    ) -> None:
        self._guesses, self._rule, self._gradients = guesses, rule, gradients
        self._updates, self._pipeline, self._masks = updates, pipeline, masks
        self._durable_every = durable_every
        self._guess: Guess | None = None
        self._expected: Decision | None = None  # set while units are updated by it
        self._has_speculated = False  # in this step

    def begin(self, step: int) -> None:
        """Begin a step, counted from 1, before its first gradient."""
        self._expected, self._has_speculated = None, False
        self._guess = self._guesses.of(step)
        self._pipeline.plan(self._guess is not None)

    def received(self, step: int, stage: int, units: Sequence[Unit]) -> None:
        """Let units whose gradients have arrived be updated, if the guess may still be right.

        Only after the updates of the last step, whose seal is requested.
        """
        guess = self._guess
        is_expected = self._guesses.expects(stage, self._gradients.squares_so_far)
        if guess is None:
            return
        if self._masks.may_change(step) or self._certainly_differs(guess):
            self._guess = None
            self._pipeline.plan(False)
            self.drop()
            return
        chosen = [unit for unit in units if is_speculative(unit) and guess.is_for(unit.index)]
        if not chosen or not is_expected:
            return
        if self._expected is None:
            rate = learning_rate(self._rule.schedule, step - 1)
            self._has_speculated = True
            self._expected = Decision(step, math.nan, guess.clip_scale, rate)
            self._updates.expect(self._expected)
        self._pipeline.speculate(chosen, is_written=step % self._durable_every == 0)
        if guess.waits:
            self._pipeline.wait_for_speculation()

    def _certainly_differs(self, guess: Guess) -> bool:
        squares, limit = self._gradients.squares_so_far, self._rule.clip_norm
        if not math.isfinite(squares):
            return True
        return guess.clip_scale == 1.0 and limit is not None and squares > limit * limit

    def decided(self, decision: Decision) -> bool:
        """Return whether the speculative updates are those of this decision; otherwise throw them
        away."""
        expected = self._expected
        is_right = (
            expected is not None
            and (expected.clip_scale, expected.learning_rate)
            == (decision.clip_scale, decision.learning_rate)
            and not decision.replaces_update
        )
        self._guesses.decided(decision, is_right if self._has_speculated else None)
        if not is_right:
            self.drop()
        return is_right

    def drop(self) -> None:
        """Throw the speculative updates of the step away."""
        self._expected = None
        self._pipeline.drop_speculation()
