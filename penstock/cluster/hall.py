"""Where the processes of a run meet: the door, who is who, and whom to start for whoever is lost.

The hall is there before the store: shards that are apart must have come before anything can be put
into them. A process that joins is given the place of a shard that is vacant, else that of an
engine. Who takes part in which step is decided by the conductor, which has its seat here.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.cluster.bodies import Figures, Join, Opens
from penstock.cluster.calls import Calls, error_class
from penstock.cluster.crew import Crew
from penstock.cluster.launch import Launcher
from penstock.cluster.plan import digest_of, placement_of, transfers_of
from penstock.cluster.record import remove_record, write_record
from penstock.cluster.remote_store import RemoteShard
from penstock.cluster.shard_places import Place
from penstock.cluster.shard_work import ShardHere, StoreOfShard
from penstock.cluster.shards_apart import House, ShardsApart
from penstock.cluster.terms import terms_of
from penstock.cluster.vitals import Vitals
from penstock.config import Config
from penstock.errors import ClusterError, CorruptionError, PenstockError
from penstock.events import ClusterEvent
from penstock.fabric.messages import Kind, Message
from penstock.fabric.nodes import CONDUCTOR, Conductor, Happened, Leases, ShardNode
from penstock.fabric.sockets import Address, Endpoint, Link
from penstock.step_layout import Layout
from penstock.store import ShardMap, Store
from penstock.store.flash import ShardedFlashStore

log = logging.getLogger("penstock.cluster")

FIRST_ENGINE = 1000
_BEAT = 0.1
_LOOK = 0.05  # seconds between two looks at what has happened
_STARVED = 10  # leases for which a worker may wait for a processor
_PATIENCE = 120.0  # seconds in which all engines should have come


@dataclass
class _Member:
    """A process that has joined: its node, and what it is known by."""

    number: int
    link: Link
    worker: str
    listens: Address
    place: Place | None  # of a shard; None for an engine
    opens: Opens  # what it does with its store, as a shard

    @property
    def is_shard(self) -> bool:
        return self.place is not None

    @property
    def waits_for_copy(self) -> bool:
        return self.opens == "empty"

    def __str__(self) -> str:
        if self.place is None:
            return f"engine {self.number}"
        which = f"replica {self.place.replica} of " if self.place.replica else ""
        return f"{which}shard {self.place.shard}"


class Hall:
    """The processes of one run.

    Args:
        host: the interface on which to listen.
        launch: makes the launcher, given the endpoint.
        tell: is told what happens, one line at a time, by the thread that asks for steps.
        should_stop: whether waiting for others is to end.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        *,
        host: str,
        token: str,
        launch: Callable[[Endpoint], Launcher],
        tell: Callable[[ClusterEvent], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._config, self._layout, self._token = config, layout, token
        self._tell, self.should_stop = tell, should_stop
        self._happenings: queue.SimpleQueue[ClusterEvent] = queue.SimpleQueue()
        self.step = 0  # at which the run stands
        self.counts: Counter[str] = Counter()
        self.vitals = Vitals()
        self._plan()
        self._members: dict[int, _Member] = {}
        self._joining: dict[Link, _Member] = {}
        self._addresses: dict[int, Address] = {}
        self._next = FIRST_ENGINE
        self._failed: PenstockError | None = None
        self._is_closed = False
        shards, replicas = config.store.shards, config.store.replicas
        # The first nodes of each shard.
        self._first = [[1 + s + r * shards for r in range(replicas)] for s in range(shards)]
        self._local: list[ShardNode] = []
        with contextlib.ExitStack() as undo:
            self._open(host, launch, undo)
            undo.pop_all()  # from here on it is `close` that ends what was begun

    def _open(
        self, host: str, launch: Callable[[Endpoint], Launcher], undo: contextlib.ExitStack
    ) -> None:
        """Open the door, let it be found, and have workers started."""
        config, layout, token = self._config, self._layout, self._token
        self._endpoint = Endpoint(
            token,
            host,
            on_link_end=self._link_ended,
            on_stranger=self._stranger,
            on_failure=self._endpoint_failed,
            every=self._every,
            beat=_BEAT,
            port=config.cluster.port,
        )
        undo.callback(self._endpoint.close)
        self._endpoint.shares_memory = config.cluster.shared_memory == "auto"
        self.conductor = Conductor(
            self._endpoint.runtime(CONDUCTOR),
            self._first,
            config.engines,
            Leases(config.cluster.lease, config.cluster.stall, config.cluster.longest_job),
            self._happened,
            least=layout.least_engines,
            addresses=self._addresses,
            others_come=self._others_come,
            is_there=self._is_there,
        )
        self._endpoint.add(CONDUCTOR, _Desk(self))
        self._calls = Calls(self._send, self.require_sound)
        self._apart = self._make_shards()
        self._places = self._apart.places
        self._record = write_record(config.run.dir, self._endpoint.address, token)
        undo.callback(remove_record, self._record, token)
        self.launcher = launch(self._endpoint)
        undo.callback(self.launcher.close)
        self._crew = Crew(self.launcher, self.say)
        self._crew.fill(self._wanted_workers)
        self._endpoint.start()

    def _plan(self) -> None:
        """Settle what all processes must agree on, and what they are told of it."""
        config, layout = self._config, self._layout
        program, count = layout.program, config.store.shards
        self._is_apart = config.cluster.shards == "apart"
        self._parts = list(ShardMap.of(program, count).parts(program))
        recompute = layout.plan.recompute
        self._transfers = transfers_of(program, recompute, placement_of(program, count), count)
        self._digest = digest_of(program, self._transfers)
        self._told = terms_of(config, layout)

    def _make_shards(self) -> ShardsApart:
        house = House(
            self.conductor,
            self.say,
            self._fail,
            self.look,
            self._do,
            lambda: self.should_stop(),
            self._addresses.get,
        )
        parts = self._parts if self._is_apart else []
        return ShardsApart(self._config, parts, self._calls, house)

    @property
    def _wanted_workers(self) -> int:
        """How many workers are to run: engines, spare ones, and shards that are apart."""
        shards = self._config.store.holders - self._places.given_up if self._is_apart else 0
        return self._wanted_engines + shards

    @property
    def _wanted_engines(self) -> int:
        return self.conductor.wanted + self._config.cluster.spare

    @property
    def address(self) -> Address:
        """Where the run listens."""
        return self._endpoint.address

    @property
    def carried_bytes(self) -> int:
        """What this process has sent to all others and taken from them, frames' heads apart."""
        links = [member.link for member in self._members.values()]
        return sum(link.sent_bytes + link.taken_bytes for link in links)

    def figures(self) -> dict[int, Figures]:
        """Return what the engines of the present view have last said of themselves."""
        return self.vitals.figures(self.conductor.engines)

    def worker_of(self, node: int) -> str:
        """Return the name of the worker that a node runs in."""
        return self._members[node].worker

    def call(self, action: Callable[[], None]) -> None:
        """Do something in the thread in which all else happens here."""
        self._endpoint.call(action)

    @property
    def has_failed(self) -> bool:
        """Whether it is impossible to go on."""
        return self._failed is not None

    def look(self) -> None:
        """Tell what has happened, in the trainer's thread, and raise what ends the run."""
        self._tell_all()
        self.require_sound()

    def _tell_all(self) -> None:
        while not self._happenings.empty():
            self._tell(self._happenings.get())

    def require_sound(self) -> None:
        """Raise what makes it impossible to go on, if there is anything."""
        if self._failed is not None:
            raise self._failed
        if self._is_closed:
            raise ClusterError("the run's processes have been let go of")

    # The store's shards

    def remote_shards(self) -> list[RemoteShard] | None:
        """Return the shards that are apart, once all have come; None if they are not apart.

        Raises:
            PenstockError: one cannot be made.
        """
        return self._apart.remote() if self._is_apart else None

    def copy_to_newcomers(self, store: Store) -> None:
        """Give those who have come to hold a shard beside others, between two steps, what it holds.

        Raises:
            InterruptedError: a stop was asked for.
        """
        self._apart.copy_to_newcomers(store if isinstance(store, ShardedFlashStore) else None)

    def seat_shards(self, stores: Sequence[Store]) -> None:
        """Have the shards of a store in this process take part."""
        recompute, program = self._layout.plan.recompute, self._layout.program

        def seat() -> None:
            for shard, store in enumerate(stores):
                number = self._first[shard][0]
                work = StoreOfShard(program, ShardHere(store), shard, recompute)
                runtime = self._endpoint.runtime(number)
                node = ShardNode(number, shard, runtime, self._transfers, work)
                self._endpoint.add(number, node)
                self._local.append(node)

        self._do(seat)

    def comes_back(self, node: int) -> bool:
        """Tell whether a node was that of a shard whose place another takes, or has taken."""
        return self._places.comes_back(node)

    def is_at_rest(self) -> bool:
        """Tell whether no shard works any more for a step of an epoch before the present one."""
        if not self._is_apart:
            return not any(node.is_busy for node in self._local)
        return self.vitals.have_rested(self._places.all_nodes, self.conductor.epoch)

    # Engines

    def await_engines(self) -> None:
        """Before the first step, let all engines come, unless that takes too long.

        Raises:
            InterruptedError: a stop was asked for.
        """
        wanted, deadline = self._config.engines, time.monotonic() + _PATIENCE
        while len(self.conductor.ready) < wanted:
            self.look()
            if self.should_stop():
                raise InterruptedError("stopped while waiting for engines")
            if time.monotonic() > deadline:
                text = f"{len(self.conductor.ready)} of {wanted} engines have come"
                self.say("waiting", f"{text} in {_PATIENCE:.0f} s; beginning with those")
                return
            time.sleep(0.02)

    def _others_come(self) -> bool:
        """Tell whether another engine is started in the place of one that is lost."""
        is_ours = self._config.cluster.start != "listen"
        return bool(self._joining) or (is_ours and self._crew.given_up is None)

    def _is_there(self, node: int, silent: float) -> bool:
        """Tell whether a silent node only waits its turn: on its link, or for a processor."""
        member, lease = self._members.get(node), self._config.cluster.lease
        if member is None:
            return False
        if member.link.is_heard(lease):
            return True
        return silent < _STARVED * lease and self.launcher.starves(member.worker)

    def scale(self, engines: int) -> None:
        """Go on with so many engines from the next step on, as soon as they are there.

        **Raises:** `ClusterError` if there cannot be so many, or nobody listens any more.
        """
        self._require_engines(engines)
        self._do(lambda: self._scale(engines))

    def _require_engines(self, wanted: object) -> int:
        least, most = self._layout.least_engines, self._layout.micro_batches
        if type(wanted) is not int or not least <= wanted <= most:
            raise ClusterError(
                f"engines: expected {least} (with fewer, a step does not fit engine.memory) to "
                f"{most} (one micro-batch each), got {wanted!r}"
            )
        return wanted

    def _scale(self, engines: int) -> int:
        before, self.conductor.wanted = self.conductor.wanted, engines
        self._crew.fill(self._wanted_workers)
        self.say("scaled", f"{before} engines before, {engines} from the next step on")
        return before

    def close(self) -> None:
        """End the workers and close the door."""
        if self._is_closed:
            return
        self._is_closed = True
        remove_record(self._record, self._token)
        self._endpoint.close()
        self.launcher.close()
        self._tell_all()

    def _do(self, action: Callable[[], object]) -> None:
        """Do something in the endpoint's thread, and wait for it."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._endpoint.call(act)
        while not done.wait(timeout=0.5):
            self.require_sound()

    def _send(self, node: int, message: Message) -> None:
        self._endpoint.call(lambda: self._endpoint.send(CONDUCTOR, node, message))

    # In the endpoint's thread

    def _every(self, now: float) -> None:
        for node in self._local:
            body = {"progress": node.progress, "busy": node.is_busy}
            self.conductor.handle(Message(Kind.BEAT, 0, node.number, body=body))
        self.conductor.tick(now)
        self._crew.replace(self._wanted_workers)
        few = len(self.conductor.ready) < self._layout.least_engines
        if (
            self._crew.given_up is not None
            and (few or self._places.are_missing)
            and not self._joining
        ):
            self._fail(ClusterError(self._crew.given_up))

    def _fail(self, error: PenstockError) -> None:
        self._failed = self._failed or error

    def _endpoint_failed(self, error: Exception) -> None:
        self._fail(ClusterError(f"the run's network failed: {type(error).__name__}: {error}"))
        log.error("the endpoint failed", exc_info=error)

    def _stranger(self, link: Link, message: Message) -> None:
        """Take what a peer says before it is somebody."""
        if message.kind is Kind.JOIN:
            self._welcome(link, Join.read(message))
        elif message.kind is Kind.READY and link in self._joining:
            self._admit(self._joining.pop(link), message.body)
        elif message.kind is Kind.TROUBLE and link in self._joining:
            member, kind = self._joining.pop(link), str(message.body.get("error"))
            text = f"{member} could not be made: {message.body.get('text')}"
            self._turn_away(member, text, error_class(kind))
        elif message.kind is Kind.ORDER:
            self._take_order(link, message.body)

    def _welcome(self, link: Link, said: Join) -> None:
        """Give a process that joins its place."""
        place = self._place_for(said)
        if place is None and said.shard is not None:
            self._refuse(link, f"shard {said.shard} of the store is not wanted: it is there")
            return
        opens: Opens = "when asked"
        number = self._next
        if place is not None and not self._places.have_come:
            number = self._first[place.shard][place.replica]
        else:
            self._next += 1
        if place is not None and self._places.have_come:
            opens = "empty" if self._places.is_held(place.shard) else "what was left"
        self._joining[link] = _Member(number, link, said.worker, said.listens, place, opens)
        body = {
            "node": number,
            "place": None if place is None else list(place),
            "opens": opens,
            "run": self._told,
            "shards_there": [] if self._is_apart else [nodes[0] for nodes in self._first],
        }
        link.send(Message(Kind.WELCOME, 0, CONDUCTOR, body=body))

    def _place_for(self, said: Join) -> Place | None:
        """Return the place that a process gets which joins, None if it is to be an engine."""
        joining = self._joining.values()
        members = [*self._members.values(), *joining]
        here = [(m.place, m.listens[0]) for m in members if m.place is not None]
        engines = len(self.conductor.ready) + sum(not member.is_shard for member in joining)
        fits_engine = engines < self._wanted_engines
        return self._apart.place_for(said.shard, said.listens[0], here, fits_engine)

    def _admit(self, member: _Member, said: Mapping[str, Any]) -> None:
        """Take a process that is ready among those of the run."""
        number, link, place = member.number, member.link, member.place
        if said.get("digest") != self._digest:
            text = f"{member} has compiled another program: are its versions the same?"
            self._turn_away(member, text, ClusterError)
            return
        self._endpoint.attach(number, link)
        self._members[number] = member
        self._addresses[number] = member.listens
        self._crew.is_of_use(member.worker)
        if place is None:
            self.conductor.joined(number)
            return
        if member.waits_for_copy:
            self._places.wait_for_copy(place, number)
            self.conductor.newcomer(place.shard, number)
            return
        self._places.take(place, number)
        if member.opens == "what was left":
            self.conductor.shard_joined(place.shard, number)
        else:
            self.say("joined", f"{member} is ready", number)

    def _turn_away(self, member: _Member, text: str, kind: type[PenstockError]) -> None:
        """Let a process go that cannot be what it was to be: the run ends if it needs it."""
        is_needed = member.is_shard and not member.waits_for_copy
        if is_needed or not (member.is_shard or self.conductor.ready):
            self._fail(kind(text))
        self._refuse(member.link, text, member.number)

    def _refuse(self, link: Link, text: str, number: int | None = None) -> None:
        """Send a worker away: it would be no better the next time."""
        self.say("refused", text, number)
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
        self._joining.pop(link, None)
        number = link.peer
        if number is not None and number in self._members and self._members[number].link is link:
            if isinstance(error, CorruptionError):
                self.conductor.damaged(f"node {number}: {error}", [number])
            self.conductor.lost(number, f"its connection ended ({error})")

    def _happened(self, happened: Happened) -> None:
        is_loss = happened.kind in ("engine lost", "shard lost", "replica lost")
        self.say(happened.kind, happened.text, happened.node)
        if is_loss and happened.node is not None:
            self._lose(happened.node)

    def _lose(self, number: int) -> None:
        """Let nothing of a node come back."""
        member = self._members.pop(number, None)
        self._addresses.pop(number, None)
        self.vitals.forget(number)
        if member is None:
            return
        member.link.close()
        self.launcher.end(member.worker)
        if member.place is not None:
            self._apart.lost(member.place, number)

    def say(self, kind: str, text: str, node: int | None = None) -> None:
        """Tell of something that has happened, and count it."""
        self.counts[kind] += 1
        self._happenings.put(ClusterEvent(kind, text, node, self.step))

    def _take(self, message: Message) -> None:
        if message.kind is Kind.RETURN:
            self._calls.take(message)
            return
        if message.kind is Kind.BEAT and message.sender in self._members:
            self._calls.heard(message.sender)
            self.vitals.take(message)
        self.conductor.handle(message)


class _Desk:
    """The conductor as a node of its process."""

    progress = 0

    def __init__(self, hall: Hall) -> None:
        self._hall = hall

    def handle(self, message: Message) -> None:
        """Take a message."""
        self._hall._take(message)
