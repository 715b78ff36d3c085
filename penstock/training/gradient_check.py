"""Check that every weight trains, from the gradients of a trainer's first steps.

A zero gradient in the first step proves nothing. The gradients of an adapter's A, of a block that
starts as the identity (ReZero, adaLN-Zero) and of a block behind a projection that starts at zero
are zero until the first updates. A gradient that is zero in several steps in a row belongs to a
weight that does not affect the loss.
"""

from collections.abc import Callable

from penstock.errors import few
from penstock.store import Commit, Store

STEPS = 5
_LEAST_STEPS = 2  # a run of one step has no gradient after an update


class GradientCheck:
    """Reports, once, the weights that do not train; a resumed run is checked again.

    Steps with learning rate zero, as at the start of a warm-up, do not count.

    **Arguments:** `notice` is called with the report.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._zero: frozenset[str] = frozenset()
        self._seen = 0  # steps that counted
        self._newest = -1
        self._learning_rate = 0.0
        self._is_done = False

    def observe(self, commit: Commit, store: Store) -> None:
        """Record a step's gradients; a repeated step counts once."""
        step, rate = commit.decision.step, commit.decision.learning_rate
        if self._is_done or rate <= 0 or step <= self._newest:
            return
        zero = frozenset(commit.zero_gradients)
        self._zero = zero & self._zero if self._seen else zero
        self._newest, self._learning_rate = step, rate
        self._seen += 1
        if self._seen == STEPS:
            self._report(store)

    def end(self, store: Store) -> None:
        """Report at the end of the run, from the steps so far."""
        if not self._is_done and self._seen >= _LEAST_STEPS:
            self._report(store)

    def _report(self, store: Store) -> None:
        self._is_done = True
        if self._zero:
            in_order = [name for name in store.program.weights if name in self._zero]
            self._notice(
                f"{len(in_order)} weight(s) do not train: their gradient was zero in every element "
                f"in {self._seen} steps, and only weight decay changes them: {few(in_order)}. "
                "Freeze them by name, or find out why the loss does not depend on them"
            )
        store.flush()
        lost = [name for name in store.unchanged() if name not in self._zero]
        if lost:
            self._notice(
                f"{len(lost)} weight(s) have not changed in {self._seen} steps: every update was "
                f"too small for their precision, at a learning rate of {self._learning_rate:g}: "
                f"{few(lost)}. Raise optimizer.learning_rate, unless a warm-up raises it"
            )
