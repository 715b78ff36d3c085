"""What follows when something goes wrong with a step: who loses its place, how it is tried again.

Nothing is done here: the conductor does what is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from penstock.distributed.protocol.epoch import Formation
from penstock.distributed.protocol.failure_detector import FailureDetector
from penstock.distributed.protocol.membership import Roster
from penstock.distributed.protocol.retry_budget import Patience
from penstock.distributed.protocol.step_request import TroubleError
from penstock.distributed.protocol.step_transaction import Attempt, Phase
from penstock.errors import ClusterError

_MOST_COMMITS = 4  # to a shard that does not answer


@dataclass(frozen=True)
class Lose:
    """A node loses its place."""

    node: int
    why: str


@dataclass(frozen=True)
class GiveUp:
    """The step ends, for what trying again would not mend."""

    error: Exception


@dataclass(frozen=True)
class BeginAnew:
    """The step begins anew, in a new epoch."""

    why: str


@dataclass(frozen=True)
class SayAgain:
    """What is decided is said again."""


Remedy = Lose | GiveUp | BeginAnew | SayAgain


class Remedies:
    """Remembers what has gone wrong with a step, and says what to do about it.

    Args:
        roster: who there is.
        attempts: how often a step may begin anew for damage and standstills.
        others_come: whether another engine may come where none is left.
    """

    def __init__(self, roster: Roster, attempts: int, others_come: Callable[[], bool]) -> None:
        self._roster, self._attempts, self._others_come = roster, attempts, others_come
        self._patience = Patience(0, attempts)

    def begin(self, step: int) -> None:
        """Begin to count for a step, unless it is tried again."""
        if step > self._patience.step:
            self._patience = Patience(step, self._attempts)

    def of_failure(self, engine: int, kind: str, text: str) -> Remedy:
        """An engine has failed: it loses its place, unless others would fail in the same way.

        Args:
            kind: the name of the error's class.
        """
        ends_with = self._patience.failed(engine, kind, text)
        if ends_with is None and not self._has_another(engine):
            ends_with = f"engine {engine}, the only one there is: {kind}: {text}"
        if ends_with is None:
            return Lose(engine, f"its work failed: {kind}: {text}")
        return self._give_up(TroubleError(engine, kind, ends_with))

    def _has_another(self, engine: int) -> bool:
        left = [other for other in self._roster.engines if other != engine]
        return len(left) >= self._roster.least or self._others_come()

    def of_damage(self, standing: Standing, text: str, ends: Collection[int]) -> Remedy:
        """Something came whose checksum is wrong: nobody knows what it was to say.

        Args:
            ends: the nodes at the ends of the link, as far as they are known.
        """
        # The last node of a shard keeps its place: it may be all that there is of it.
        is_last = self._roster.holders.is_last
        known = [node for node in ends if node in self._roster and not is_last(node)]
        worst = self._patience.damaged(known, standing.formation.view.engines)
        why = f"frames on its links come damaged again and again; {text}"
        behind = None if worst is None or is_last(worst) else Lose(worst, why)
        return self._again(standing, "damage", text, behind)

    def of_standstill(self, standing: Standing) -> Remedy:
        """Nobody computes and nothing moves: something was lost on the way."""
        behind = self._behind(standing) if self._patience.standstills else None
        text = "nothing moves"
        if behind is not None:
            text = f"the step stands still behind node {behind.node}"
        if standing.phase is Phase.COMMITTING:
            behind = self._behind(standing)
        return self._again(standing, "standstill", text, behind)

    def _again(self, standing: Standing, why: str, text: str, behind: Lose | None) -> Remedy:
        """Try the step again, or say what is decided again; at the cost of who is behind it."""
        is_decided, attempt = standing.phase is Phase.COMMITTING, standing.attempt
        attempt.commits += is_decided
        try:
            self._patience.begins_anew(why, text)
        except ClusterError as error:
            if not is_decided:
                return self._give_up(error)
            behind = self._behind(standing)  # it has to be made; without a shard it cannot be
        if behind is not None and (not is_decided or attempt.commits > _MOST_COMMITS):
            return behind
        return SayAgain() if is_decided else BeginAnew(text)

    def _behind(self, standing: Standing) -> Lose | None:
        found = who_is_behind(standing, self._roster, self._patience.standstills)
        return None if found is None else Lose(*found)

    def _give_up(self, error: Exception) -> GiveUp:
        """End the step; who tries it again begins to count."""
        self._patience = Patience(0, self._attempts)
        return GiveUp(error)


_TRIES = 5


@dataclass(frozen=True)
class Standing:
    """Where the step in flight stands."""

    phase: Phase
    formation: Formation
    attempt: Attempt
    detector: FailureDetector


def who_is_behind(standing: Standing, roster: Roster, standstills: int) -> tuple[int, str] | None:
    """Return who is nearest to what was lost on the way, and why; None if it is too early."""
    phase, formation, attempt = standing.phase, standing.formation, standing.attempt
    if phase is Phase.COMMITTING:
        return attempt.unanswered[0], "it has not answered to the commit"
    if phase is not Phase.RUNNING:
        missing, why = formation.unseen, "it has not answered to a new epoch"
        if phase is Phase.AGREEING:
            missing, why = formation.agreement.missing, "it has not said at which step it stands"
        if standstills <= _TRIES:
            missing = [node for node in missing if not roster.holders.is_last(node)]
        return (missing[0], why) if missing else None
    if behind := attempt.behind:
        return behind[0], "the others of its shard have got on, it has not"
    # Who has got least is behind the broken link; of equals, the one nearest the root.
    progress = standing.detector.progress(formation.view.engines)
    return min(progress, key=lambda n: progress[n]), "the step stands still behind it"
