"""Who keeps the others waiting when nobody computes and nothing moves, as far as that shows.

It may be a link that is broken, so that who is named here may be as sound as the rest: the last
node of a shard, with which all that it holds may be lost, is named only after several standstills.
"""

from __future__ import annotations

from penstock.fabric.nodes.agreement import Agreement
from penstock.fabric.nodes.attempt import Attempt
from penstock.fabric.nodes.orders import Phase
from penstock.fabric.nodes.roster import Roster

_TRIES = 5


def who_is_behind(
    phase: Phase, attempt: Attempt, agreement: Agreement, roster: Roster, standstills: int
) -> tuple[int, str] | None:
    """Return who is nearest to what was lost on the way, and why; None if it is too early."""
    if phase is Phase.COMMITTING:
        return attempt.unanswered[0], "it has not answered to the commit"
    if phase is not Phase.RUNNING:
        missing, why = attempt.unseen, "it has not answered to a new epoch"
        if phase is Phase.AGREEING:
            missing, why = agreement.missing, "it has not said at which step it stands"
        if standstills <= _TRIES:
            missing = [node for node in missing if not roster.holders.is_last(node)]
        return (missing[0], why) if missing else None
    if behind := attempt.behind:
        return behind[0], "the others of its shard have got on, it has not"
    # Who has got least is behind the broken link; of equals, the one nearest the root.
    progress = roster.progress(attempt.engines)
    return min(progress, key=lambda n: progress[n]), "the step stands still behind it"
