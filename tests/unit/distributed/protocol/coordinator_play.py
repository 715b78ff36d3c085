"""A conductor, and the nodes that it speaks to, which the tests play."""

from __future__ import annotations

import numpy as np

from penstock.distributed.protocol import (
    Conductor,
    Happened,
    Leases,
    Outcome,
    Part,
    message_validation,
)
from penstock.distributed.protocol.messages import Kind, Message

SHARDS, ENGINES = (1, 2), (100, 101, 102)


class Order:
    """A step of so many micro-batches, with rows of one number each."""

    def __init__(self, step: int, micro_batches: int = 8) -> None:
        self.step, self.micro_batches = step, micro_batches
        self.forbidden: Exception | None = None

    def parts(self, engines: int) -> list[Part]:
        return [Part({"total": self.micro_batches}, {"x": np.zeros(1)})] * engines

    def report(self, message) -> dict:
        message_validation.integer(message, "shard", 0, {"shard": 0} | dict(message.body))
        return dict(message.body)

    answer = report

    def difference(self, first, other) -> str | None:
        return None if first == other else "a sum"

    def decide(self, losses, prepared) -> dict:
        if self.forbidden is not None:
            raise self.forbidden
        return {"scale": sum(losses)}


class Play:
    """A conductor, and the nodes that it speaks to."""

    def __init__(
        self,
        engines=ENGINES,
        wanted: int | None = None,
        agreed: bool = True,
        shards=((1,), (2,)),
    ) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.happened: list[Happened] = []
        self.ended: list[Outcome] = []
        leases = Leases(silence=1.0, stall=2.0, job=10.0)
        self.conductor = Conductor(
            self,
            shards,
            wanted or len(engines) or 1,
            leases,
            self.happened.append,
        )
        self.now = 100.0
        self.conductor.tick(self.now)
        for engine in engines:
            self.conductor.joined(engine)
        if agreed and engines:
            self.start(1)
            self.see()
            self.agree([[0]] * len(self.conductor.roster.holders.nodes))
            self.finish()
            self.ended.clear()

    def send(self, to: int, message: Message) -> None:
        self.sent.append((to, message))

    def take(self, kind: Kind) -> list[tuple[int, Message]]:
        """The messages of a kind that were sent since the last look at it."""
        found = [entry for entry in self.sent if entry[1].kind is kind]
        self.sent = [entry for entry in self.sent if entry[1].kind is not kind]
        return found

    def start(self, step: int, **fields) -> Order:
        order = Order(step, **fields)
        self.conductor.start(order, self.ended.append)
        return order

    def say(self, sender: int, kind: Kind, **fields) -> None:
        step = fields.pop("step", self.conductor._step)
        epoch = fields.pop("epoch", self.conductor.epoch)
        self.conductor.handle(Message(kind, epoch, sender, step, **fields))

    def see(self) -> list[int]:
        """All that are told of the new epoch have seen it; returns them."""
        told = [to for to, _ in self.take(Kind.VIEW)]
        for node in told:
            self.say(node, Kind.SEEN, step=0)
        return told

    def agree(self, steps=([0], [0])) -> list[int]:
        """The shards say what they hold, and go back; returns to which step."""
        for (shard, _), held in zip(self.take(Kind.HOLDS), steps, strict=True):
            self.say(shard, Kind.HOLDS, step=0, body={"steps": held})
        asked = self.take(Kind.GO_BACK)
        for shard, message in asked:
            self.say(shard, Kind.GO_BACK, step=0, body=dict(message.body))
        return [message.body["to"] for _, message in asked]

    def begun(self) -> list[int]:
        return [to for to, _ in self.take(Kind.BEGIN)]

    def work(self) -> None:
        """The engines of the view send their losses, the shards have all gradients."""
        for engine in self.conductor.engines:
            self.lose(engine)
        for shard in self.conductor.roster.holders.nodes:
            self.say(shard, Kind.PREPARED)

    def lose(self, engine: int) -> None:
        engines = self.conductor.engines
        place, total = engines.index(engine), self.conductor._attempt.order.micro_batches
        count = total * (place + 1) // len(engines) - total * place // len(engines)
        self.say(engine, Kind.LOSSES, body={"losses": [(1.0).hex()] * count})

    def finish(self) -> None:
        self.begun()
        self.work()
        for shard, _ in self.take(Kind.COMMIT):
            self.say(shard, Kind.COMMITTED, body={"shard": shard})

    def pass_time(self, seconds: float, busy=(), silent=(), beat: float = 0.2) -> None:
        for _ in range(round(seconds / beat)):
            for node in (*self.conductor.roster.holders.nodes, *self.conductor.ready):
                if node not in silent:
                    body = {"progress": 0, "busy": node in busy}
                    self.say(node, Kind.BEAT, epoch=0, body=body)
            self.now += beat
            self.conductor.tick(self.now)
