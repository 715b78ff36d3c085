"""Counts the failures of one step and limits its retries.

An error that only one engine meets is caused by that engine. An error that a second engine meets at
the same step is caused by the step. A retry repairs a single corrupt frame or stall. Repeated
corrupt frames or stalls have a cause that a retry does not repair.
"""

import re
from collections import Counter
from collections.abc import Collection

from penstock.errors import ClusterError, NonFiniteError

_MOST_CORRUPTIONS = 4  # in succession; then a node is evicted
_MOST_FAILURES = 3  # of different engines at one step, with any errors
_MODEL_ERROR = NonFiniteError.__name__


class RetryBudget:
    """Counts the failures of one step.

    Args:
        step: the number of the step.
        attempts: how often the step may be retried after corrupt frames, invalid messages and
            stalls.
    """

    def __init__(self, step: int, attempts: int) -> None:
        self.step = step
        self._attempts = attempts
        self._failed: dict[int, str] = {}  # the error of each engine
        self._corruptions: Counter[int] = Counter()  # by node, without evicted nodes
        self._corruptions_in_a_row = 0
        self._counts: Counter[str] = Counter()
        self._last = ""

    def count_failure(self, engine: int, kind: str, text: str) -> str | None:
        """Record an engine's error; return the final error's text if the engine is not the cause.

        Args:
            kind: the name of the error's class.
        """
        own = f"{kind}: {_without_numbers(text)}"
        same = [other for other, known in self._failed.items() if known == own and other != engine]
        self._failed[engine] = own
        if kind == _MODEL_ERROR:
            return text
        if same:
            return (
                f"step {self.step}: engines {same[0]} and {engine} failed with the same error, so "
                f"the cause is not one engine: {kind}: {text}"
            )
        if len(self._failed) >= _MOST_FAILURES:
            return (
                f"step {self.step}: {len(self._failed)} engines failed with different errors; the "
                f"last, engine {engine}: {kind}: {text}"
            )
        return None

    def count_corruption(self, ends: Collection[int], engines: Collection[int]) -> int | None:
        """Record the nodes at the two ends of a connection with a corrupt frame.

        Returns: the node to evict, if any: the node whose connections had the most corrupt frames.
        """
        self._corruptions_in_a_row += 1
        self._corruptions.update(ends)
        if self._corruptions_in_a_row < _MOST_CORRUPTIONS or not self._corruptions:
            return None
        worst = max(self._corruptions, key=lambda node: (self._corruptions[node], node in engines))
        self._corruptions_in_a_row = 0
        del self._corruptions[worst]  # the next one may have had its frames on the same connection
        return worst

    def count_retry(self, why: str, last: str) -> None:
        """Record a retry of the step.

        Args:
            why: "corruption", "invalid message" or "stall".
            last: the last failure, as text.

        Raises:
            ClusterError: the retry budget is spent.
        """
        self._counts[why] += 1
        self._last = last
        if self._counts.total() <= self._attempts:
            return
        counted = f"{self._counts['corruption']} times for a damaged frame, "
        if self._counts["invalid message"]:
            counted += f"{self._counts['invalid message']} times for an invalid message, "
        counted += f"{self._counts['stall']} times without progress for cluster.stall"
        raise ClusterError(
            f"step {self.step} was retried {self._counts.total()} times: {counted}; the last time: "
            f"{self._last}. Check that all hosts of the run can connect to each other on any port "
            "(a firewall between engines?), their network cards and cables (ethtool -S) and their "
            "memory (dmesg). Then give the same command again"
        )

    @property
    def stalls(self) -> int:
        """How many stalls there were."""
        return self._counts["stall"]


def _without_numbers(text: str) -> str:
    """Return an error's text without numbers, which differ between hosts for the same error."""
    return re.sub(r"0x[0-9a-f]+|[0-9]+(\.[0-9]+)?", "#", text)
