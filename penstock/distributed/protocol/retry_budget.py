"""What has gone wrong with one step so far, and when it has been tried often enough.

An error that only one engine meets is that engine's; one that a second engine meets at the same
step follows the step around. A damaged frame or a stall is made good by trying again; one that
comes again and again has a cause that trying again does not mend.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

from penstock.errors import ClusterError, NonFiniteError

_DAMAGES_OF_A_PLACE = 4  # in a row; then a node loses its place
_FAILURES = 3  # of different engines at one step, with whatever errors
_OF_THE_MODEL = NonFiniteError.__name__


class RetryBudget:
    """Counts what went wrong with one step.

    Args:
        step: its number.
        attempts: how often it may begin anew for damage and standstills.
    """

    def __init__(self, step: int, attempts: int) -> None:
        self.step = step
        self._attempts = attempts
        self._failed: dict[int, str] = {}  # what each engine met
        self._damaged: Counter[int] = Counter()  # at a node's links, since one lost its place
        self._damages = 0
        self._counts: Counter[str] = Counter()
        self._last = ""

    def failed(self, engine: int, kind: str, text: str) -> str | None:
        """Take what an engine's work ran into; return what to end with if it is not the engine's.

        Args:
            kind: the name of the error's class.
        """
        own = f"{kind}: {_without_figures(text)}"
        same = [other for other, met in self._failed.items() if met == own and other != engine]
        self._failed[engine] = own
        if kind == _OF_THE_MODEL:
            return text
        if same:
            return (
                f"step {self.step}: engines {same[0]} and {engine} have met the same error, so it "
                f"is not one engine's: {kind}: {text}"
            )
        if len(self._failed) >= _FAILURES:
            return (
                f"step {self.step}: {len(self._failed)} engines have failed, each in its own way; "
                f"engine {engine}: {kind}: {text}"
            )
        return None

    def damaged(self, ends: Collection[int], engines: Collection[int]) -> int | None:
        """Take which nodes are at the ends of a link on which a frame was damaged.

        Returns: who is to lose its place, if anybody: of whose links it were most.
        """
        self._damages += 1
        self._damaged.update(ends)
        if self._damages < _DAMAGES_OF_A_PLACE or not self._damaged:
            return None
        worst = max(self._damaged, key=lambda node: (self._damaged[node], node in engines))
        self._damages = 0
        self._damaged.clear()
        return worst

    def count_retry(self, why: str, last: str) -> None:
        """Take note that the step begins anew.

        Args:
            why: "damage" or "standstill".
            last: what was seen.

        Raises:
            ClusterError: it has begun often enough.
        """
        self._counts[why] += 1
        self._last = last
        if self._counts.total() <= self._attempts:
            return
        seen = f"{self._counts['damage']} times for a damaged frame, "
        seen += f"{self._counts['standstill']} times because nothing moved for cluster.stall"
        raise ClusterError(
            f"step {self.step} has begun anew {self._counts.total()} times: {seen}; the last time: "
            f"{self._last}. Check that all hosts of the run reach each other on any port (a "
            "firewall between engines?), their network cards and cables (ethtool -S) and their "
            "memory (dmesg); then give the same command again"
        )

    @property
    def standstills(self) -> int:
        """How often nothing has moved."""
        return self._counts["standstill"]


def _without_figures(text: str) -> str:
    """Return a text by which the same error is known on another host: sizes and places differ."""
    return re.sub(r"0x[0-9a-f]+|[0-9]+(\.[0-9]+)?", "#", text)
