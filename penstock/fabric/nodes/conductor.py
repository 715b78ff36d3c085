"""The conductor's part of the step protocol: when a step counts.

A step is an attempt in an epoch: everyone has seen the view, begins, and reports; when all losses
and all shards' gradients are in, the step is decided, and the shards are told until each has
answered. Whatever is lost before the decision costs the attempt: the epoch rises, and the step
begins anew with those who are left. After it the engines are not needed. Who there is, is in the
roster (`roster.py`).

A shard may have several nodes that hold the same and do the same (`holders.py`). As long as one is
left nothing is lost with the others. When the last is lost the step ends with an error. Another may
come in its place, with what the lost one had stored; before the next step, then, all shards go back
to the newest step that all of them hold (`agreement.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import ClusterError, ProtocolError, StorageError
from penstock.fabric.messages import Kind, Message, message_with, pack_arrays
from penstock.fabric.nodes import checks
from penstock.fabric.nodes.agreement import Agreement
from penstock.fabric.nodes.attempt import Attempt
from penstock.fabric.nodes.frame import CONDUCTOR
from penstock.fabric.nodes.orders import (
    Happened,
    Leases,
    Outcome,
    Phase,
    StepOrder,
    TroubleError,
    WentBackError,
)
from penstock.fabric.nodes.patience import Patience
from penstock.fabric.nodes.roster import Beat, Roster
from penstock.fabric.nodes.runtime import Runtime
from penstock.fabric.nodes.suspects import who_is_behind
from penstock.fabric.view import View

# The attempt can be given up and made again in these.
_OPEN = (Phase.FORMING, Phase.AGREEING, Phase.RUNNING)

_MOST_COMMITS = 4  # to a shard that does not answer


class Conductor:
    """Drives one step at a time.

    Args:
        runtime: carries its messages.
        shards: the numbers of each shard's nodes, in the order of the shards.
        engines: how many engines are wanted; `wanted` may be set at any time.
        leases: when silence and standstill count as losses.
        tell: is told what happens.
        least: with fewer engines than this no step is made: they would not have the memory.
        addresses: where nodes listen, by number; those of a view's nodes are sent with it.
        others_come: whether another engine may come where none is left.
        is_there: whether a node that has been silent for so long is there for all that.
    """

    def __init__(
        self,
        runtime: Runtime,
        shards: Sequence[Sequence[int]],
        engines: int,
        leases: Leases,
        tell: Callable[[Happened], None],
        least: int = 1,
        addresses: Mapping[int, Any] | None = None,
        others_come: Callable[[], bool] = lambda: True,
        is_there: Callable[[int, float], bool] = lambda node, silent: False,
    ) -> None:
        self.roster = Roster(shards, engines, least)
        self._addresses = addresses if addresses is not None else {}
        self._others_come, self._is_there = others_come, is_there
        self.epoch = 0
        self.phase = Phase.IDLE
        self.counts: Counter[str] = Counter()
        self._runtime, self._leases, self._tell = runtime, leases, tell
        self._view = View(self.roster.holders.shards, ())
        self._is_formed = False  # whether the view's members have seen it, and none left a step
        self._is_agreed = False  # whether all shards are known to stand at one step
        self._order: StepOrder | None = None
        self._done: Callable[[Outcome], None] = lambda outcome: None
        self._attempt = Attempt(self._view, 0)
        self._agreement = Agreement(())
        self._moved_at = 0.0
        self._moved: Any = None
        self._patience = Patience(0, leases.attempts)

    # What the run's process says

    @property
    def ready(self) -> Sequence[int]:
        """The engines that may take part, spare ones too."""
        return self.roster.engines

    @property
    def engines(self) -> Sequence[int]:
        """The engines of the present view."""
        return self._view.engines

    @property
    def wanted(self) -> int:
        """How many engines are to take part, from the next step on."""
        return self.roster.wanted

    @wanted.setter
    def wanted(self, engines: int) -> None:
        self.roster.wanted = engines

    def joined(self, engine: int) -> None:
        """An engine is ready; it takes part from the next step on, if it is wanted."""
        self.roster.join(engine)
        self._happened("joined", f"engine {engine} is ready", engine)
        if self.phase is Phase.GATHERING:
            self._form()

    @property
    def holders(self) -> Sequence[Sequence[int]]:
        """The nodes of every shard, the one that streams first."""
        return self.roster.holders.shards

    @property
    def newcomers(self) -> Sequence[int]:
        """The nodes that wait for a copy of a shard."""
        return tuple(self.roster.holders.newcomers)

    @property
    def is_agreed(self) -> bool:
        """Whether all nodes of all shards are known to stand at one step."""
        return self._is_agreed

    def shard_joined(self, shard: int, node: int) -> None:
        """A new node has taken the place of a shard that was lost, with what that had stored."""
        self.roster.seat(shard, node)
        self._is_agreed = False
        self._happened("shard joined", f"shard {shard} is node {node} now", node)
        if self.phase is Phase.GATHERING:
            self._form()

    def newcomer(self, shard: int, node: int) -> None:
        """A new node has come to hold a shard beside others, as soon as it has a copy of it."""
        self.roster.come(shard, node)
        self._happened("replica joined", f"shard {shard}: node {node} waits for a copy of it", node)

    def whole(self, node: int) -> bool:
        """A newcomer has been given, between two steps, all that the nodes of its shard hold.

        Returns whether it is one of them now: it is not if it was lost, or they all were.
        """
        holders = self.roster.holders
        shard = holders.newcomers.get(node)
        if shard is None or not holders.shards[shard]:
            return False
        if self.phase is not Phase.IDLE:
            raise RuntimeError(f"node {node} has a copy of a step before: {self.phase.value}")
        holders.add(shard, node)
        return True

    def lost(self, node: int, why: str) -> None:
        """A node is gone, or counts as gone."""
        if node not in self.roster:
            return
        if node in self._shards:
            self._lose_holder(node, why)
            return
        shard = self.roster.holders.newcomers.get(node)
        self.roster.lose(node)
        if shard is not None:
            self._happened("replica lost", f"shard {shard}: node {node}, no copy yet: {why}", node)
            return
        self._happened("engine lost", f"engine {node}: {why}", node)
        if node in self._view.engines and self.phase in _OPEN:
            self._form()

    def start(self, order: StepOrder, done: Callable[[Outcome], None]) -> None:
        """Have a step made; `done` is called once, with how it ended."""
        if self.phase is not Phase.IDLE:
            raise RuntimeError(f"a step is in flight: {self.phase.value}")
        self._order, self._done = order, done
        if order.step > self._patience.step:
            self._patience = Patience(order.step, self._leases.attempts)
        members = self.roster.view(order.micro_batches)
        if self._is_formed and self._is_agreed and self._view == members:
            self._begin()
        else:
            self._form()

    def cancel(self) -> None:
        """Give the step in flight up, unless it is decided: then it ends by itself."""
        if self.phase in (Phase.GATHERING, *_OPEN):
            self._is_formed = False
            self._end(Outcome(self._step, error=InterruptedError("the step was given up")))

    def disband(self) -> None:
        """After a step that ended with an error: let nobody go on with it."""
        if self.phase is not Phase.IDLE or not self._view.engines:
            return  # without a view nobody has begun anything
        self.epoch += 1
        self._is_formed = False
        body = self._view.as_body()
        for node in self.roster.here:
            self._send(node, Kind.VIEW, body)

    # What nodes say

    def handle(self, message: Message) -> None:
        """Take a message; one that makes no sense costs its sender its place."""
        try:
            self._take(message)
        except ProtocolError as error:
            self._refuse(message.sender, error)

    def _take(self, message: Message) -> None:
        sender, kind = message.sender, message.kind
        if kind is Kind.BEAT:
            self.roster.hear(sender, Beat.read(message))
            return
        self.roster.hear(sender)
        if message.epoch != self.epoch:
            self.counts["stale messages"] += 1
            return
        if kind is Kind.DAMAGED:
            self._take_damaged(message)
        elif kind is Kind.SEEN and self.phase is Phase.FORMING:
            self._take_seen(sender)
        elif kind is Kind.HOLDS and self.phase is Phase.AGREEING and sender in self._shards:
            self._take_held(message)
        elif kind is Kind.GO_BACK and self.phase is Phase.AGREEING and sender in self._shards:
            self._take_gone_back(message)
        elif kind is Kind.TROUBLE and message.step in (0, self._step):
            self._take_trouble(message)
        elif message.step != self._step:
            self.counts["stale messages"] += 1
        elif kind is Kind.LOSSES and self.phase is Phase.RUNNING:
            self._take_losses(message)
        elif kind is Kind.PREPARED and self.phase is Phase.RUNNING and sender in self._shards:
            self._take_prepared(message)
        elif kind is Kind.COMMITTED and self.phase is Phase.COMMITTING and sender in self._shards:
            self._take_committed(message)

    def damaged(self, text: str, ends: Collection[int] = ()) -> None:
        """Something came whose checksum is wrong: nobody knows what it was to say.

        Args:
            ends: the nodes at the ends of the link, as far as they are known.
        """
        self.counts["damaged"] += 1
        if self.phase not in (Phase.COMMITTING, *_OPEN):
            return
        # The last node of a shard keeps its place: it may be all that there is of it.
        is_last = self.roster.holders.is_last
        known = [node for node in ends if node in self.roster and not is_last(node)]
        worst = self._patience.damaged(known, self._view.engines)
        why = f"frames on its links come damaged again and again; {text}"
        behind = None if worst is None or is_last(worst) else (worst, why)
        self._try_again("damage", text, behind)

    def tick(self, now: float) -> None:
        """Look whether somebody has been silent, or nothing has moved, for too long."""
        roster = self.roster
        self._moved_at += roster.pass_time(now, self._leases.silence / 4)
        for node, silent in roster.silent(self._leases.silence):
            if not self._is_there(node, silent):
                self.lost(node, f"silent for {silent:.1f} s")
        if self.phase in (Phase.IDLE, Phase.GATHERING):
            self._moved_at = now
            return
        members = (*self._view.engines, *self._view.shard_nodes)
        busy = roster.busy(members)
        far = tuple(roster.progress(members).values())
        moved = (self.phase, self.epoch, *self._attempt.counts, far)
        still = now - self._moved_at
        if moved != self._moved:
            self._moved, self._moved_at = moved, now
        elif still > self._leases.job and busy:
            self._moved_at = now
            self._lose_for_its_time(busy[0], still)
        elif still > self._leases.stall and not busy:
            self._moved_at = now
            self._stalled()

    # The view

    @property
    def _step(self) -> int:
        return self._order.step if self._order is not None else 0

    @property
    def _shards(self) -> tuple[int, ...]:
        return self.roster.holders.nodes

    def _form(self) -> None:
        """Raise the epoch and tell everybody who takes part."""
        assert self._order is not None
        view = self.roster.view(self._order.micro_batches)
        self._is_formed = False
        lacks = self.roster.lacks(view)
        if lacks is not None:
            self._phase(Phase.GATHERING)
            self._happened("waiting", f"{lacks}; waiting")
            return
        self.epoch += 1
        self._view = view
        self._attempt = Attempt(view, self._order.micro_batches)
        self._phase(Phase.FORMING)
        nodes = (*view.shard_nodes, *view.engines)
        listening = {str(n): self._addresses[n] for n in nodes if n in self._addresses}
        body = {**view.as_body(), "addresses": listening}
        for node in self.roster.here:  # spare engines forget what they held
            self._send(node, Kind.VIEW, body)

    def _take_seen(self, sender: int) -> None:
        if not self._attempt.see(sender):
            return
        self._is_formed = True
        if self._is_agreed:
            self._begin()
            return
        self._agreement = Agreement(self.roster.holders.shards)
        self._phase(Phase.AGREEING)
        for shard in self._shards:
            self._send(shard, Kind.HOLDS)

    def _take_held(self, message: Message) -> None:
        steps = message.body.get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, int) for step in steps):
            raise checks.refuse(message, f"holds {str(steps)[:80]!r}")
        if not self._agreement.hold(message.sender, steps):
            return
        try:
            to = self._agreement.newest(self._step)
        except StorageError as error:
            self._end(Outcome(self._step, error=error))
            return
        without = self._agreement.without(to)
        for node in without:  # another node of its shard holds it
            self.lost(node, f"it does not hold step {to}, to which all go back")
        if not without:
            for node in self._shards:
                self._send(node, Kind.GO_BACK, {"to": to})

    def _take_gone_back(self, message: Message) -> None:
        to = checks.integer(message, "to", 0)
        if not self._agreement.go_back(message.sender):
            return
        self._is_agreed = True
        if to + 1 == self._step:
            self._begin()
            return
        self._happened("went back", f"all shards stand at step {to}")
        self._end(Outcome(self._step, error=WentBackError(to)))

    # The attempt

    def _begin(self) -> None:
        order = self._order
        assert order is not None
        self._is_formed = False  # until this step has come to its end, nobody may begin another
        self._attempt = Attempt(self._view, order.micro_batches)
        self._phase(Phase.RUNNING)
        count = len(self._view.engines)
        try:
            parts = [
                (engine, part.body, *pack_arrays(part.rows))
                for engine, part in zip(self._view.engines, order.parts(count), strict=True)
            ]
        except Exception as error:  # the data's: it ends the step, not the conductor
            self._end(Outcome(order.step, error=error))
            return
        for node in self._shards:
            self._send(node, Kind.BEGIN)
        for engine, body, described, payload in parts:
            self._send(engine, Kind.BEGIN, {**body, "rows": described}, payload)

    def _take_losses(self, message: Message) -> None:
        self._attempt.lose(message)
        self._decide_if_whole()

    def _take_prepared(self, message: Message) -> None:
        assert self._order is not None
        self._attempt.prepare(message.sender, self._order.report(message))
        self._decide_if_whole()

    def _decide_if_whole(self) -> None:
        order, attempt = self._order, self._attempt
        assert order is not None
        if not attempt.is_whole:
            return
        try:
            attempt.decision = order.decide(attempt.losses, attempt.reports)
        except Exception as error:  # not committed, for a reason that the caller is told
            self._end(Outcome(order.step, error=error))
            return
        self._phase(Phase.COMMITTING)
        self._send_commit()

    def _send_commit(self) -> None:
        for node in self._attempt.unanswered:
            self._send(node, Kind.COMMIT, self._attempt.decision)

    def _take_committed(self, message: Message) -> None:
        assert self._order is not None
        self._attempt.answer(message.sender, self._order.answer(message))
        self._end_if_committed()

    def _end_if_committed(self) -> None:
        attempt = self._attempt
        if not attempt.unanswered:
            self._is_formed = True
            self._end(Outcome(self._step, attempt.losses, attempt.decision, attempt.answers))

    # What goes wrong

    def _take_damaged(self, message: Message) -> None:
        sender, peer = message.sender, message.body.get("peer")
        if sender not in self.roster:
            return
        ends = [sender, peer] if type(peer) is int else [sender]
        self.damaged(f"node {sender}: {str(message.body.get('text'))[:200]}", ends)

    def _take_trouble(self, message: Message) -> None:
        sender, about = message.sender, message.body.get("about")
        if sender not in (*self._view.engines, *self._shards):
            return
        if self.phase is Phase.COMMITTING:
            if sender not in self._shards:
                return  # the step needs no engine any more
        elif self.phase not in _OPEN:
            return  # it was about an attempt that is given up
        kind, text = str(message.body.get("error")), str(message.body.get("text"))
        if about in self._view.engines:
            self._fail(about, kind, text)  # it has sent what makes no sense
        elif sender in self._view.engines:
            self._fail(sender, kind, text)
        elif self.roster.holders.is_last(sender):
            self._end(Outcome(self._step, error=TroubleError(sender, kind, text)))
        else:
            self.lost(sender, f"it cannot go on: {text}")

    def _refuse(self, sender: int, error: ProtocolError) -> None:
        """A node has sent what makes no sense; to the run it is no node any more."""
        if sender in self._view.engines and self.phase in _OPEN:
            self._fail(sender, type(error).__name__, str(error))
        elif sender in self.roster:
            self.lost(sender, str(error))

    def _fail(self, engine: int, kind: str, text: str) -> None:
        """An engine has failed: it loses its place, unless others would fail in the same way."""
        ends_with = self._patience.failed(engine, kind, text)
        if ends_with is None and not self._has_another(engine):
            ends_with = f"engine {engine}, the only one there is: {kind}: {text}"
        if ends_with is None:
            self.lost(engine, f"its work failed: {kind}: {text}")
            return
        self._give_up(TroubleError(engine, kind, ends_with))

    def _has_another(self, engine: int) -> bool:
        left = [other for other in self.roster.engines if other != engine]
        return len(left) >= self.roster.least or self._others_come()

    def _give_up(self, error: Exception) -> None:
        """End the step for what trying again would not mend; who tries again begins to count."""
        self._patience = Patience(0, self._leases.attempts)
        self._end(Outcome(self._step, error=error))

    def _lose_for_its_time(self, node: int, seconds: float) -> None:
        text = (
            f"one job of it has taken {seconds:.0f} s, which is over cluster.longest_job; if a "
            "stage of its share, or an update of a shard, may take that long, raise it"
        )
        if node in self._view.engines and self.phase in _OPEN:
            self._fail(node, ClusterError.__name__, text)
        else:
            self.lost(node, text)

    def _lose_holder(self, node: int, why: str) -> None:
        holders = self.roster.holders
        shard = holders.shard_of(node)
        streamed = holders.shards[shard][0] == node
        self.roster.lose(node)
        left = holders.shards[shard]
        if not left:
            self._is_formed = False
            self._happened("shard lost", f"shard {shard}: {why}", node)
            self._end(Outcome(self._step, error=TroubleError(node, "StorageError", why)))
            return
        others = " and ".join(f"node {other}" for other in left)
        text = f"shard {shard}: node {node}: {why}; {others} goes on with it"
        self._happened("replica lost", text, node)
        self._attempt.leave(node)
        if self.phase is Phase.COMMITTING:
            self._end_if_committed()
        elif self.phase is Phase.RUNNING and not streamed:
            self._decide_if_whole()  # what the others send it, nobody needs
        elif self.phase in _OPEN:
            self._form()

    def _stalled(self) -> None:
        """Nobody computes and nothing moves: something was lost on the way."""
        again = self._patience.standstills > 0
        behind = self._behind() if again else None
        text = "nothing moves"
        if behind is not None:
            text = f"the step stands still behind node {behind[0]}"
        if self.phase is Phase.COMMITTING:
            behind = self._behind()
        self._try_again("standstill", text, behind)

    def _behind(self) -> tuple[int, str] | None:
        standstills = self._patience.standstills
        return who_is_behind(self.phase, self._attempt, self._agreement, self.roster, standstills)

    def _try_again(self, why: str, text: str, behind: tuple[int, str] | None = None) -> None:
        """Try the step again, in a new epoch, or say what is decided again.

        Args:
            behind: a node that loses its place for it, and the reason.
        """
        is_decided = self.phase is Phase.COMMITTING
        self._attempt.commits += is_decided
        try:
            self._patience.begins_anew(why, text)
        except ClusterError as error:
            if not is_decided:
                self._give_up(error)
                return
            behind = self._behind()  # it has to be made; without a shard it cannot be
        if behind is not None and (not is_decided or self._attempt.commits > _MOST_COMMITS):
            self.lost(*behind)
        elif is_decided:
            self._send_commit()
        else:
            self._happened("retry", f"{text}: the step begins anew in a new epoch")
            self.roster.holders.turn()  # it may be that the one that streams is not reached
            self._form()

    def _end(self, outcome: Outcome) -> None:
        if self.phase is Phase.IDLE:
            return
        if self.phase is Phase.COMMITTING and outcome.error is not None:
            self._is_agreed = False  # some shards may have committed
        done, self._done = self._done, lambda outcome: None
        self._phase(Phase.IDLE)
        self._order = None
        done(outcome)

    def _phase(self, phase: Phase) -> None:
        self.phase, self._moved_at = phase, self.roster.now

    def _happened(self, kind: str, text: str, node: int | None = None) -> None:
        self.counts[kind] += 1
        self._tell(Happened(kind, text, node))

    def _send(
        self,
        to: int,
        kind: Kind,
        body: Mapping[str, Any] | None = None,
        payload: np.ndarray | None = None,
    ) -> None:
        said = {"epoch": self.epoch, "sender": CONDUCTOR, "step": self._step, "body": body or {}}
        self._runtime.send(to, message_with(payload, kind=kind, **said))
