"""Who keeps the others waiting when nobody computes and nothing moves, as far as that shows.

It may be a link that is broken, so that who is named here may be as sound as the rest: the last
node of a shard, with which all that it holds may be lost, is named only after several standstills.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.distributed.protocol.epoch import Formation
from penstock.distributed.protocol.membership import Roster
from penstock.distributed.protocol.step_request import Phase
from penstock.distributed.protocol.step_transaction import Attempt

_TRIES = 5


@dataclass(frozen=True)
class Standing:
    """Where the step in flight stands."""

    phase: Phase
    formation: Formation
    attempt: Attempt


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
    progress = roster.progress(formation.view.engines)
    return min(progress, key=lambda n: progress[n]), "the step stands still behind it"
