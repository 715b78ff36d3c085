"""Steps of a run whose engines are other processes.

Here are the run's store, the conductor, and the door through which workers come. A step is asked
for by the trainer's thread and made by the nodes; whoever is lost meanwhile is replaced, and the
trainer learns of it only from what happened.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock import errors, process_memory
from penstock.assembly import thread_count
from penstock.batches import Batches
from penstock.cluster.launch import Ended, Launcher
from penstock.cluster.plan import Holdings, digest_of, transfers_of
from penstock.cluster.record import remove_record, write_record
from penstock.cluster.shard_work import StoreOfShard, report_of
from penstock.cluster.stragglers import Stragglers
from penstock.config import Config
from penstock.errors import ClusterError, NonFiniteError, PenstockError
from penstock.events import ClusterEvent, StepDone
from penstock.export import KEPT
from penstock.fabric.messages import Kind, Message
from penstock.fabric.nodes import (
    CONDUCTOR,
    Conductor,
    Happened,
    Leases,
    Outcome,
    Part,
    Phase,
    ShardNode,
    TroubleError,
)
from penstock.fabric.sockets import Address, Endpoint, Link
from penstock.program import Program
from penstock.step_layout import Layout
from penstock.store import Store, global_norm, merged

log = logging.getLogger("penstock.cluster")

FIRST_ENGINE = 1000
_BEAT = 0.1
_MOST_IN_VAIN = 3
_GIVING_UP = 60.0  # seconds in which a step that is decided must end
_LOOK = 0.05  # seconds between two looks at what has happened
_PATIENCE = 120.0  # seconds in which all engines should have come


class ClusterRunner:
    """Runs steps of one layout over a store and engines in other processes.

    Args:
        stores: the shards of the store, in their order.
        holdings: what each of them holds of every weight.
        host: the interface on which to listen.
        launch: makes the launcher, given the endpoint and the token.
        tell: is told what happens, one line at a time, by the thread that asks for steps.
        should_stop: whether waiting for engines is to end.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        store: Store,
        stores: Sequence[Store],
        holdings: Holdings,
        batches: Batches,
        *,
        tokens: int,
        host: str,
        token: str,
        launch: Callable[[Endpoint], Launcher],
        tell: Callable[[ClusterEvent], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._config, self._layout, self._store = config, layout, store
        self._batches, self._tokens, self._token = batches, tokens, token
        self._should_stop = should_stop
        self._happenings: queue.SimpleQueue[ClusterEvent] = queue.SimpleQueue()
        self._last_words = ""
        self._tell = tell
        recompute = layout.plan.recompute
        self._transfers = transfers_of(layout.program, recompute, holdings, len(stores))
        self._digest = digest_of(layout.program, self._transfers)
        self._told = {
            "config": config.to_mapping(),
            "micro_batch": layout.micro_batch,
            "length": layout.sequence_length,
            "slot_bytes": layout.slot_bytes,
            "recompute": sorted(recompute),
            "shards": len(stores),
            "engine_bytes": layout.budget_bytes,
            "kept": _kept_files(config),
            # The same for all: PyTorch cuts sums over rows by the number of its threads.
            "threads": thread_count(config.engine.threads),
        }
        self.counts: Counter[str] = Counter()
        self._addresses: dict[int, Any] = {}
        self._links: dict[int, Link] = {}
        self._joining: dict[Link, int] = {}
        self._listens: dict[int, Any] = {}
        self._workers: dict[int, str] = {}
        self._useful: set[str] = set()  # workers that have been engines
        self._in_vain = 0  # workers in a row that ended before
        self._next = FIRST_ENGINE
        self._peak_bytes = 0
        self._stragglers = Stragglers(config.cluster.slow)
        self._failed: PenstockError | None = None
        self._is_closed = self._has_begun = False
        self._shard_numbers = [1 + shard for shard in range(len(stores))]
        self._endpoint = Endpoint(
            token,
            host,
            on_link_end=self._link_ended,
            on_stranger=self._stranger,
            on_failure=self._endpoint_failed,
            every=self._every,
            beat=_BEAT,
        )
        self._conductor = Conductor(
            self._endpoint.runtime(CONDUCTOR),
            self._shard_numbers,
            config.engines,
            Leases(config.cluster.lease, config.cluster.stall),
            self._happened,
            least=layout.least_engines,
            addresses=self._addresses,
        )
        self._endpoint.add(CONDUCTOR, _Desk(self))
        self._shards = []
        for shard, part in enumerate(stores):
            number = 1 + shard
            work = StoreOfShard(layout.program, part, shard, recompute)
            runtime = self._endpoint.runtime(number)
            node = ShardNode(number, shard, runtime, self._transfers, work)
            self._shards.append(node)
            self._endpoint.add(number, node)
        self._record = write_record(config.run.dir, self._endpoint.address, token)
        self._launcher = launch(self._endpoint)
        self._running = 0
        for _ in range(config.engines + config.cluster.spare):
            self._start_worker()
        self._endpoint.start()

    @property
    def address(self) -> Address:
        """Where the run listens."""
        return self._endpoint.address

    @property
    def engine_peak_bytes(self) -> int:
        """The most that any engine has said to have held."""
        return self._peak_bytes

    def run(self) -> StepDone:
        """Do one step and commit it, whoever is lost meanwhile.

        Raises:
            NonFiniteError: and whatever the data or the store raise; the step has then not
                happened, and running it again is safe.
            ClusterError: no engine can be had.
        """
        started = time.perf_counter()
        self._store.take_traffic()
        ended = threading.Event()
        outcomes: list[Outcome] = []

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            ended.set()

        self._await_engines()
        program, done_steps = self._layout.program, self._store.step
        order = _Order(program, self._batches, done_steps, self._config.run.seed)
        self._endpoint.call(lambda: self._conductor.start(order, done))
        try:
            while not ended.wait(timeout=_LOOK):
                self._look()
                if self._conductor.phase is Phase.GATHERING and self._should_stop():
                    raise InterruptedError("stopped while waiting for engines")
        except BaseException:  # the next step must find the conductor at rest
            self._give_up(ended)
            raise
        self._look()
        outcome = outcomes[0]
        if outcome.error is not None:
            self._give_up(ended)
            raise _as_ours(outcome.error)
        self._endpoint.call(self._look_for_stragglers)
        answer = outcome.answers[0]
        traffic, flash = self._store.take_traffic(), self._store.take_flash_traffic()
        seconds = time.perf_counter() - started
        return StepDone(
            step=answer["step"],
            loss=math.fsum(outcome.losses) * order.scale,
            learning_rate=float.fromhex(answer["learning_rate"]),
            grad_norm=float.fromhex(answer["grad_norm"]),
            clip_scale=float.fromhex(answer["clip_scale"]),
            seconds=seconds,
            tokens=self._tokens,
            streamed_bytes=traffic.streamed_bytes,
            gradient_bytes=traffic.gradient_bytes,
            engine_bytes=self._peak_bytes,
            store_bytes=sum(self._store.memory_bytes.values()),
            flash_read_bytes=flash.read_bytes,
            flash_written_bytes=flash.written_bytes,
            flash_wait_seconds=flash.waited_seconds,
            compute_seconds=max(0.0, seconds - traffic.update_seconds - flash.waited_seconds),
            weight_seconds=0.0,
            update_seconds=traffic.update_seconds,
            snapshot_seconds=traffic.snapshot_seconds,
            peak_rss_bytes=process_memory.peak_resident_bytes(),
        )

    def _look(self) -> None:
        """Tell what has happened, in the trainer's thread, and raise what ends the run."""
        while not self._happenings.empty():
            self._tell(self._happenings.get())
        if self._failed is not None:
            raise self._failed

    def _give_up(self, ended: threading.Event) -> None:
        """Return when nobody works for the step any more, be it given up or failed."""
        if self._failed is not None:
            return  # nobody listens
        self._endpoint.call(self._conductor.cancel)
        deadline = time.monotonic() + _GIVING_UP
        while not ended.wait(timeout=_LOOK) and time.monotonic() < deadline:
            pass
        self._endpoint.call(self._conductor.disband)
        told = threading.Event()
        self._endpoint.call(told.set)
        told.wait(timeout=_GIVING_UP)
        while any(node.is_busy for node in self._shards):
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)

    def _await_engines(self) -> None:
        """Before the first step, let all engines come, unless that takes too long."""
        if self._has_begun:
            return
        self._has_begun = True
        deadline = time.monotonic() + _PATIENCE
        while len(self._conductor.ready) < self._config.engines:
            self._look()
            if self._should_stop():
                self._has_begun = False
                raise InterruptedError("stopped while waiting for engines")
            if time.monotonic() > deadline:
                text = f"{len(self._conductor.ready)} of {self._config.engines} engines have come"
                self._say("waiting", f"{text} in {_PATIENCE:.0f} s; beginning with those")
                return
            time.sleep(0.02)

    def scale(self, engines: int) -> None:
        """Go on with so many engines from the next step on, as soon as they are there.

        **Raises:** `ClusterError` if there cannot be so many, or nobody listens any more.
        """
        self._require_engines(engines)
        done = threading.Event()

        def scale() -> None:
            self._scale(engines)
            done.set()

        self._endpoint.call(scale)
        if not done.wait(timeout=_GIVING_UP):
            raise self._failed or ClusterError("the run's network does not answer")

    def _require_engines(self, wanted: object) -> int:
        least, most = self._layout.least_engines, self._layout.micro_batches
        if not isinstance(wanted, int) or not least <= wanted <= most:
            raise ClusterError(
                f"engines: expected {least} (with fewer, a step does not fit engine.memory) to "
                f"{most} (one micro-batch each), got {wanted!r}"
            )
        return wanted

    def _scale(self, engines: int) -> int:
        before, self._conductor.wanted = self._conductor.wanted, engines
        for _ in range(engines + self._config.cluster.spare - self._running):
            self._start_worker()
        self._say("scaled", f"{before} engines before, {engines} from the next step on")
        return before

    def close(self) -> None:
        """End the workers and close the door."""
        if self._is_closed:
            return
        self._is_closed = True
        remove_record(self._record, self._token)
        self._endpoint.close()
        self._launcher.close()
        while not self._happenings.empty():
            self._tell(self._happenings.get())

    # In the endpoint's thread

    def _every(self, now: float) -> None:
        for node in self._shards:
            body = {
                "progress": node.progress,
                "busy": node.is_busy,
            }
            self._conductor.handle(Message(Kind.BEAT, 0, node.number, body=body))
        self._conductor.tick(now)
        for ended in self._launcher.poll():
            self._replace(ended)
        few = len(self._conductor.ready) < self._layout.least_engines
        if self._in_vain >= _MOST_IN_VAIN and few and not self._joining:
            text = "workers in a row ended before they could compute"
            self._failed = ClusterError(f"{self._in_vain} {text}; {self._last_words}")

    def _replace(self, ended: Ended) -> None:
        """Start another worker for one that has ended, unless they end before they compute."""
        self._say("worker ended", ended.how)
        self._running -= 1
        self._last_words = ended.how
        if ended.worker in self._useful:
            self._useful.discard(ended.worker)
        else:
            self._in_vain += 1
        if self._in_vain >= _MOST_IN_VAIN:
            text = f"{self._in_vain} workers in a row ended before they could compute"
            self._say("not replaced", f"{text}; {ended.how}")
        elif self._running < self._conductor.wanted + self._config.cluster.spare:
            self._start_worker()

    def _start_worker(self) -> None:
        try:
            self._launcher.start()
        except OSError as error:
            self._say("not started", f"a worker could not be started: {error}")
            return
        self._running += 1

    def _look_for_stragglers(self) -> None:
        computed = {}
        for engine, beat in self._conductor.beats.items():
            said = beat.get("computed")
            if isinstance(said, list) and len(said) == 2:
                computed[engine] = (float(said[0]), int(said[1]))
        patience = self._config.cluster.evict_slow
        for slow in self._stragglers.look(computed):
            text = f"engine {slow.engine} takes {slow.times:.1f} times as long as the others"
            self._say("slow", text, slow.engine)
            spare = len(self._conductor.ready) > self._conductor.wanted
            if patience is not None and slow.looks >= patience and spare:
                self._conductor.lost(slow.engine, f"it was slow {slow.looks} times in a row")

    def _endpoint_failed(self, error: Exception) -> None:
        self._failed = ClusterError(f"the run's network failed: {type(error).__name__}: {error}")
        log.error("the endpoint failed", exc_info=error)

    def _stranger(self, link: Link, message: Message) -> None:
        """Take what a peer says before it is somebody."""
        if message.kind is Kind.JOIN:
            number, self._next = self._next, self._next + 1
            self._joining[link] = number
            self._listens[number] = message.body.get("listens")
            self._workers[number] = str(message.body.get("worker"))
            body = {"node": number, "run": self._told, "shards_there": self._shard_numbers}
            link.send(Message(Kind.WELCOME, 0, CONDUCTOR, body=body))
        elif message.kind is Kind.READY and link in self._joining:
            number = self._joining.pop(link)
            if message.body.get("digest") != self._digest:
                text = f"engine {number} has compiled another program: are its versions the same?"
                self._refuse(link, number, text, ClusterError)
                return
            self._endpoint.attach(number, link)
            self._links[number] = link
            self._addresses[number] = self._listens.pop(number)
            self._useful.add(self._workers[number])
            self._in_vain = 0
            self._conductor.joined(number)
        elif message.kind is Kind.TROUBLE and link in self._joining:
            number = self._joining.pop(link)
            text = f"engine {number} could not be made: {message.body.get('text')}"
            self._refuse(link, number, text, _known(str(message.body.get("error"))))
        elif message.kind is Kind.ORDER:
            self._take_order(link, message.body)

    def _refuse(self, link: Link, number: int, text: str, kind: type[PenstockError]) -> None:
        """Send a worker away: it would be no better the next time."""
        self._say("refused", text, number)
        self._listens.pop(number, None)
        self._workers.pop(number, None)
        if not self._conductor.ready:
            self._failed = kind(text)
        link.send(Message(Kind.ANSWER, 0, CONDUCTOR, body={"error": text}))

    def _take_order(self, link: Link, body: Mapping[str, Any]) -> None:
        """Change the number of engines, as a command asks."""
        try:
            wanted = self._require_engines(body.get("engines"))
        except ClusterError as error:
            link.send(Message(Kind.ANSWER, 0, CONDUCTOR, body={"error": str(error)}))
            return
        before = self._scale(wanted)
        link.send(Message(Kind.ANSWER, 0, CONDUCTOR, body={"engines": wanted, "before": before}))

    def _link_ended(self, link: Link, error: Exception) -> None:
        joining = self._joining.pop(link, None)
        if joining is not None:
            self._listens.pop(joining, None)
            self._workers.pop(joining, None)
        number = link.peer
        if number is not None and self._links.get(number) is link:
            self._forget(number)
            self._conductor.lost(number, f"its connection ended ({error})")

    def _happened(self, happened: Happened) -> None:
        if happened.kind == "engine lost" and happened.node is not None:
            self._forget(happened.node)
            self._launcher.end(self._workers.pop(happened.node))  # nothing of it may come back
        self._say(happened.kind, happened.text, happened.node)

    def _forget(self, number: int) -> None:
        self._addresses.pop(number, None)
        link = self._links.pop(number, None)
        if link is not None:
            link.close()

    def _say(self, kind: str, text: str, node: int | None = None) -> None:
        self.counts[kind] += 1
        self._happenings.put(ClusterEvent(kind, text, node, self._store.step))

    def _take(self, message: Message) -> None:
        if message.kind is Kind.BEAT:
            peak = message.body.get("peak_bytes")
            self._peak_bytes = max(self._peak_bytes, peak if isinstance(peak, int) else 0)
        self._conductor.handle(message)


class _Desk:
    """The conductor as a node of its process."""

    progress = 0

    def __init__(self, runner: ClusterRunner) -> None:
        self._runner = runner

    def handle(self, message: Message) -> None:
        """Take a message."""
        self._runner._take(message)


class _Order:
    """One step, as the conductor has it made."""

    def __init__(self, program: Program, batches: Batches, done: int, seed: int) -> None:
        self._program = program
        self.step = done + 1
        self.micro_batches = batches.micro_batches
        self.scale = 1.0
        self._batches, self._done, self._seed = batches, done, seed

    def parts(self, engines: int) -> Sequence[Part]:
        """Return what each engine begins with."""
        parts = self._batches.parts(self._done, engines)
        self.scale = self._batches.loss_scale(self._done, parts)
        return [
            Part(
                {
                    "first": part.numbers.start,
                    "count": len(part.numbers),
                    "total": self.micro_batches,
                    "seed": self._seed,
                    "scale": self.scale,
                },
                {name: tensor.numpy() for name, tensor in part.rows.items()},
            )
            for part in parts
        ]

    def decide(
        self, losses: Sequence[float], prepared: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return the decision to commit by.

        Raises:
            NonFiniteError: a loss or a gradient is not a number.
            NoTrainingError: a trainable weight has got no gradient.
        """
        for number, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise NonFiniteError(
                    f"step {self.step}: the loss of micro-batch {number} is {loss}. The step was "
                    f"not committed: the weights are those of step {self._done}. Look at the "
                    "batch, or start a run with a lower optimizer.learning_rate in another "
                    "run.dir; with cluster.start: none the stage is named in which it began."
                )
        reports = [report_of(said) for said in prepared]
        norm = global_norm(self._program, self.step, merged(self._program, reports))
        return {"norm": norm.hex()}


def _kept_files(config: Config) -> str | None:
    """Return where the run keeps what it needs of `model.hf`, which may be gone."""
    kept = (config.run.dir / KEPT).absolute()
    return str(kept) if kept.is_dir() else None


def _as_ours(error: BaseException) -> BaseException:
    """Return a node's trouble as the error that it was there."""
    if isinstance(error, TroubleError):
        return _known(error.kind)(str(error))
    return error


def _known(kind: str) -> type[PenstockError]:
    found = getattr(errors, kind, ClusterError)
    return found if isinstance(found, type) and issubclass(found, PenstockError) else ClusterError
