"""Where the processes of a run meet, and from where those who are lost are replaced.

The hall is there before the store: shards that are apart must have come before anything can be put
into them. How a process becomes a node of the run is in `rendezvous.py`, who is who in `guests.py`.
Who takes part in which step is decided by the conductor, which has its seat here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import Config
from penstock.distributed import rendezvous_file
from penstock.distributed.control.event_queue import News
from penstock.distributed.control.rendezvous import Guest, Guests, Reception
from penstock.distributed.control.worker_stats import Vitals
from penstock.distributed.control.worker_supervisor import Crew
from penstock.distributed.control_messages import Figures, Role
from penstock.distributed.launchers.base import Launcher
from penstock.distributed.launchers.factory import make_launcher
from penstock.distributed.protocol import CONDUCTOR, Conductor, Happened, Leases, ShardNode
from penstock.distributed.protocol.messages import Kind, Message
from penstock.distributed.rendezvous_file import remove_record, write_record
from penstock.distributed.replication.replica_manager import House, ShardsApart
from penstock.distributed.rpc.rpc import Calls
from penstock.distributed.rpc.store_client import RemoteShard
from penstock.distributed.run_spec import RunPlan
from penstock.distributed.transport import Address, Endpoint, Link, new_token
from penstock.distributed.worker.shard_executor import StoreOfShard
from penstock.distributed.worker.shard_storage import ShardHere
from penstock.errors import ClusterError, CorruptionError, PenstockError
from penstock.planning.execution_plan import Layout
from penstock.store import Store
from penstock.store.flash import ShardedFlashStore
from penstock.telemetry.events import ClusterEvent

log = logging.getLogger("penstock.distributed")

_BEAT = 0.1
_STARVED = 10  # leases for which a worker may wait for a processor
_PATIENCE = 120.0  # seconds in which all engines should have come


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
        self.should_stop = should_stop
        self.news, self.vitals = News(tell), Vitals()
        self.plan, self.guests = RunPlan.of(config, layout), Guests()
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
            on_stranger=self._take_stranger,
            on_failure=self._endpoint_failed,
            every=self._every,
            beat=_BEAT,
            port=config.cluster.port,
        )
        undo.callback(self._endpoint.close)
        self._endpoint.shares_memory = config.cluster.shared_memory == "auto"
        self.conductor = Conductor(
            self._endpoint.runtime(CONDUCTOR),
            self.plan.first_nodes,
            config.engines,
            Leases(config.cluster.lease, config.cluster.stall, config.cluster.longest_job),
            self._happened,
            least=layout.least_engines,
            addresses=self.guests.addresses,
            others_come=self._others_come,
            is_there=self._is_there,
        )
        self._endpoint.add(CONDUCTOR, _Desk(self._take))
        self._calls = Calls(self._send, self.news.require_sound)
        self._apart = self._make_shards()
        self._places = self._apart.places
        self._reception = Reception(
            self.plan,
            self.guests,
            self.conductor,
            self._apart,
            self.news,
            let_in=self._let_in,
            engines_wanted=lambda: self._wanted_engines,
        )
        self._record = write_record(config.run.dir, self._endpoint.address, token)
        undo.callback(remove_record, self._record, token)
        self.launcher = launch(self._endpoint)
        undo.callback(self.launcher.close)
        self._crew = Crew(self.launcher, self.news.say)
        self._crew.fill(self._wanted_workers)
        self._endpoint.start()

    def _make_shards(self) -> ShardsApart:
        news, parts = self.news, self.plan.parts if self.plan.is_apart else []
        house = House(
            self.conductor,
            news.say,
            news.fail,
            news.look,
            self._do,
            lambda: self.should_stop(),
            self.guests.addresses.get,
        )
        return ShardsApart(self._config, parts, self._calls, house)

    @property
    def _wanted_workers(self) -> Mapping[Role, int]:
        """How many workers are to run: shards that are apart; engines, spare ones too."""
        shards = self._config.store.holders - self._places.given_up if self.plan.is_apart else 0
        return {"shard": shards, "engine": self._wanted_engines}

    @property
    def _wanted_engines(self) -> int:
        return self.conductor.wanted + self._config.cluster.spare

    @property
    def address(self) -> Address:
        """Where the run listens."""
        return self._endpoint.address

    def figures(self) -> dict[int, Figures]:
        """Return what the engines of the present view have last said of themselves."""
        return self.vitals.figures(self.conductor.engines)

    def worker_of(self, node: int) -> str:
        """Return the name of the worker that a node runs in."""
        guest = self.guests.find(node)
        if guest is None:
            raise KeyError(node)
        return guest.worker

    def call(self, action: Callable[[], None]) -> None:
        """Do something in the thread in which all else happens here."""
        self._endpoint.call(action)

    # The store's shards

    def remote_shards(self) -> list[RemoteShard] | None:
        """Return the shards that are apart, once all have come; None if they are not apart.

        Raises:
            PenstockError: one cannot be made.
        """
        return self._apart.remote() if self.plan.is_apart else None

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
                number = self.plan.first_nodes[shard][0]
                work = StoreOfShard(program, ShardHere(store), shard, recompute)
                runtime = self._endpoint.runtime(number)
                node = ShardNode(number, shard, runtime, self.plan.transfers, work)
                self._endpoint.add(number, node)
                self._local.append(node)

        self._do(seat)

    def comes_back(self, node: int) -> bool:
        """Tell whether a node was that of a shard whose place another takes, or has taken."""
        return self._places.comes_back(node)

    def is_at_rest(self) -> bool:
        """Tell whether no shard works any more for a step of an epoch before the present one."""
        if not self.plan.is_apart:
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
            self.news.look()
            if self.should_stop():
                raise InterruptedError("stopped while waiting for engines")
            if time.monotonic() > deadline:
                text = f"{len(self.conductor.ready)} of {wanted} engines have come"
                self.news.say("waiting", f"{text} in {_PATIENCE:.0f} s; beginning with those")
                return
            time.sleep(0.02)

    def _others_come(self) -> bool:
        """Tell whether another engine is started in the place of one that is lost."""
        is_ours = self._config.cluster.start != "listen"
        return bool(self.guests.joining) or (is_ours and self._crew.given_up is None)

    def _is_there(self, node: int, silent: float) -> bool:
        """Tell whether a silent node only waits its turn: on its link, or for a processor."""
        guest, lease = self.guests.find(node), self._config.cluster.lease
        if guest is None:
            return False
        if guest.link.is_heard(lease):
            return True
        return silent < _STARVED * lease and self.launcher.starves(guest.worker)

    def scale(self, engines: int) -> None:
        """Go on with so many engines from the next step on, as soon as they are there.

        **Raises:** `ClusterError` if there cannot be so many, or nobody listens any more;
        `BudgetError` if this machine has not the memory.
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
        if self._layout.room is not None and wanted > self.conductor.wanted:
            self._layout.room.require(wanted)
        return wanted

    def _scale(self, engines: int) -> int:
        before, self.conductor.wanted = self.conductor.wanted, engines
        self._crew.fill(self._wanted_workers)
        self.news.say("scaled", f"{before} engine(s) so far, {engines} from the next step on")
        return before

    def close(self) -> None:
        """End the workers and close the door."""
        if self.news.is_over:
            return
        self.news.is_over = True
        remove_record(self._record, self._token)
        self._endpoint.close()
        self.launcher.close()
        self.news.tell_all()

    def _do(self, action: Callable[[], object]) -> None:
        """Do something in the endpoint's thread, and wait for it."""
        done = threading.Event()

        def act() -> None:
            action()
            done.set()

        self._endpoint.call(act)
        while not done.wait(timeout=0.5):
            self.news.require_sound()

    def _send(self, node: int, message: Message) -> None:
        self._endpoint.call(lambda: self._endpoint.send(CONDUCTOR, node, message))

    # In the endpoint's thread

    def _every(self, now: float) -> None:
        for node in self._local:
            body = {"progress": node.progress, "busy": node.is_busy}
            self.conductor.handle(Message(Kind.BEAT, 0, node.number, body=body))
        self.conductor.tick(now)
        self._reception.look()
        self._crew.replace(self._wanted_workers)
        few = len(self.conductor.ready) < self._layout.least_engines
        given_up, joining = self._crew.given_up, self.guests.joining
        if given_up is not None and (few or self._places.are_missing) and not joining:
            self.news.fail(ClusterError(given_up))

    def _endpoint_failed(self, error: Exception) -> None:
        text = f"the run's network failed: {type(error).__name__}: {error}"
        self.news.fail(ClusterError(text))
        log.error("the endpoint failed", exc_info=error)

    def _take_stranger(self, link: Link, message: Message) -> None:
        """Take what a peer says before it is somebody, which it may never become."""
        if message.kind is Kind.ORDER:
            link.send(Message(Kind.ANSWER, 0, CONDUCTOR, body=self._take_order(message.body)))
        else:
            self._reception.take(link, message)

    def _take_order(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Change the number of engines, as a command asks; return what to answer."""
        try:
            wanted = self._require_engines(body.get("engines"))
        except PenstockError as error:
            return {"error": str(error)}
        return {"engines": wanted, "before": self._scale(wanted)}

    def _let_in(self, guest: Guest) -> None:
        self._endpoint.attach(guest.number, guest.link)
        self._crew.is_of_use(guest.worker)

    def _link_ended(self, link: Link, error: Exception) -> None:
        self._reception.left(link)
        guest = self.guests.at(link)
        if guest is None:
            return
        number = guest.number
        if isinstance(error, CorruptionError):
            self.conductor.damaged(f"node {number}: {error}", [number])
        self.conductor.lost(number, f"its connection ended ({error})")

    def _happened(self, happened: Happened) -> None:
        is_loss = happened.kind in ("engine lost", "shard lost", "replica lost")
        self.news.say(happened.kind, happened.text, happened.node)
        if is_loss and happened.node is not None:
            self._lose(happened.node)

    def _lose(self, number: int) -> None:
        """Let nothing of a node come back."""
        guest = self.guests.lose(number)
        self.vitals.forget(number)
        if guest is None:
            return
        guest.link.close()
        self.launcher.end(guest.worker)
        if guest.place is not None:
            self._apart.lost(guest.place, number)

    def _take(self, message: Message) -> None:
        """Take what a node says to this process: to the conductor, or in answer to a call."""
        if message.kind is Kind.RETURN:
            self._calls.take(message)
            return
        if message.kind is Kind.BEAT and self.guests.find(message.sender) is not None:
            self._calls.heard(message.sender)
            self.vitals.take(message)
        self.conductor.handle(message)


@dataclass(frozen=True)
class _Desk:
    """The conductor as a node of its process."""

    handle: Callable[[Message], None]
    progress: int = 0


def open_cluster(
    config: Config,
    layout: Layout,
    *,
    tell: Callable[[ClusterEvent], None],
    should_stop: Callable[[], bool],
) -> Hall:
    """Open the door of a run and start its workers; they come when they can."""
    token = new_token()
    with contextlib.ExitStack() as undo:
        host, launch = make_launcher(config, layout.device, token, undo)
        hall = Hall(
            config,
            layout,
            host=host,
            token=token,
            launch=launch,
            tell=tell,
            should_stop=should_stop,
        )
        undo.pop_all()  # from here on it is the launcher's to end what was begun
    if config.cluster.start == "listen":
        _say_where(config, hall, tell)
    return hall


def _say_where(config: Config, hall: Hall, tell: Callable[[ClusterEvent], None]) -> None:
    """Say how to start workers, where that is left to people."""
    command = (
        f"python -m penstock.cluster.worker {config.run.dir.absolute() / rendezvous_file.NAME}"
    )
    text = "at {}:{}; on each engine's host: ".format(*hall.address) + command
    if config.cluster.shards == "apart":
        text += f"; and first, on each shard's, with --shard 0 to {config.store.shards - 1}"
        if config.store.replicas > 1:
            text += f", each on {config.store.replicas} hosts"
    tell(ClusterEvent("listening", text))
