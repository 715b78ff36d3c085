"""Decides whether the sender or the receiver of invalid messages is defective.

The checksum of an invalid message is right, so the connection is sound. One report does not tell
whether the sender or the receiver is defective. A second report about the same sender accuses the
sender; a report about another sender by the same receiver accuses the receiver.
"""

from penstock.distributed.protocol.membership import Membership


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
        is_second = any(known == sender for _, known in self._reports)
        accuses_others = any(known == receiver for known, _ in self._reports)
        self._reports.append((receiver, sender))
        if is_second:
            return sender
        return receiver if accuses_others else None

    def _counts(self, receiver: int, sender: int) -> bool:
        """Whether a report still counts: no second receiver has confirmed it before the sender
        left, so the receiver may be the defective node."""
        if receiver not in self._members:
            return False
        return sender in self._members or all(
            known == receiver for known, other in self._reports if other == sender
        )
