"""What has come of one attempt at a step: who has seen its view, who has sent what it is to send.

Nothing counts twice, and nothing of one attempt counts for another: each has an object of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.fabric.messages import Message
from penstock.fabric.nodes import checks
from penstock.fabric.view import View
from penstock.tree import share


class Attempt:
    """One attempt.

    Args:
        view: who takes part.
        micro_batches: those of the step.
    """

    def __init__(self, view: View, micro_batches: int) -> None:
        self._view, self._micro_batches = view, micro_batches
        self._seen: set[int] = set()
        self._losses: dict[int, list[float]] = {}
        self._prepared: dict[int, Any] = {}
        self._answers: dict[int, Any] = {}
        self.decision: Mapping[str, Any] = {}
        self.commits = 0  # how often the decision has been said again

    def see(self, node: int) -> bool:
        """Take note that a node has seen the view; return whether all have."""
        self._seen.add(node)
        return not self.unseen

    def lose(self, message: Message) -> None:
        """Take the losses of an engine's micro-batches.

        **Raises:** `ProtocolError` if they are none.
        """
        engines = self._view.engines
        if message.sender in engines:
            part = share(self._micro_batches, len(engines))[engines.index(message.sender)]
            self._losses[message.sender] = checks.hexadecimals(message, "losses", len(part))

    def prepare(self, shard: int, report: Any) -> None:
        """Take what a shard says of its gradients."""
        self._prepared[shard] = report

    def answer(self, shard: int, answer: Any) -> bool:
        """Take a shard's answer to the commit; return whether all have answered."""
        self._answers[shard] = answer
        return not self.unanswered

    @property
    def is_whole(self) -> bool:
        """Whether all losses and all shards' gradients are in."""
        view = self._view
        return len(self._losses) == len(view.engines) and len(self._prepared) == len(view.shards)

    @property
    def unseen(self) -> list[int]:
        """Who has not seen the view; engines first."""
        nodes = (*self._view.engines, *self._view.shards)
        return [node for node in nodes if node not in self._seen]

    @property
    def unanswered(self) -> list[int]:
        """The shards that have not answered to the commit."""
        return [shard for shard in self._view.shards if shard not in self._answers]

    @property
    def losses(self) -> list[float]:
        """The losses of all micro-batches, in their order."""
        return [x for engine in self._view.engines for x in self._losses[engine]]

    @property
    def reports(self) -> Sequence[Any]:
        """What all shards say of their gradients, in their order."""
        return [self._prepared[shard] for shard in self._view.shards]

    @property
    def answers(self) -> Sequence[Any]:
        """What all shards have answered to the commit, in their order."""
        return [self._answers[shard] for shard in self._view.shards]

    @property
    def counts(self) -> tuple[int, ...]:
        """How much has come: it grows as long as something moves."""
        return len(self._seen), len(self._losses), len(self._prepared), len(self._answers)
