"""Decides whether the sender or the receiver of invalid messages is defective.

The checksum of an invalid message is right, so the connection is sound. One receiver's reports
about one sender do not tell which of the two is defective. A report about the same sender by
another receiver accuses the sender; a report about another sender by the same receiver accuses the
receiver. So the step is retried with the engines in another order, which gives both nodes other
neighbors. If the same two nodes still exchange invalid messages, one of them is accused without
evidence.
"""

from penstock.distributed.protocol.membership import Membership

_MOST_REPORTS = 4  # by one receiver about one sender, before one of the two is accused


class InvalidMessages:
    """The reports of invalid messages, as pairs of receiver and sender.

    **Arguments:** `members` are the nodes of the run; nodes that have left accuse nobody.
    """

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._reports: list[tuple[int, int]] = []

    def record(self, receiver: int, sender: int) -> int | None:
        """Record a report; return the node that it accuses, None if it is too early to tell."""
        self._reports = [report for report in self._reports if self._counts(*report)]
        is_confirmed = any(s == sender and r != receiver for r, s in self._reports)
        accuses_others = any(r == receiver and s != sender for r, s in self._reports)
        self._reports.append((receiver, sender))
        if is_confirmed:
            return sender
        if accuses_others:
            return receiver
        if self._reports.count((receiver, sender)) < _MOST_REPORTS:
            return None
        # The loss of an engine or a relay costs less than that of a replica.
        replicas = self._members.holders.nodes
        return receiver if sender in replicas and receiver not in replicas else sender

    def _counts(self, receiver: int, sender: int) -> bool:
        """Whether a report still counts: no second receiver has confirmed it before the sender
        left, so the receiver may be the defective node."""
        if receiver not in self._members:
            return False
        return sender in self._members or all(
            known == receiver for known, other in self._reports if other == sender
        )
