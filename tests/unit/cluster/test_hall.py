"""Who is let in and who is sent away, and when a run ends because nobody comes; no processes."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from any_message import messages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import assembly
from penstock.cluster.bodies import Welcome
from penstock.cluster.hall import Hall
from penstock.cluster.launch import Ended, thread_states
from penstock.cluster.members import Member, ShardMember
from penstock.cluster.worker import Worker
from penstock.config import Config
from penstock.errors import ClusterError, ConfigError, CorruptionError, ProtocolError
from penstock.fabric.messages import Kind, Message
from penstock.fabric.nodes import EngineNode, ShardNode
from penstock.fabric.nodes.runtime import RuntimeOf
from penstock.fabric.sockets import Endpoint, Link
from penstock.step_layout import Layout, lay_out

MODEL = {
    "preset": "gpt2",
    "overrides": {"n_layer": 1, "n_embd": 32, "n_head": 1, "vocab_size": 96, "n_positions": 16},
}
TOKEN = "a token"


class PretendLauncher:
    """Starts nobody; those whom it has started have ended, if it is told so."""

    lacks: str | None = None
    starving: tuple[str, ...] = ()

    def __init__(self, is_in_vain: bool) -> None:
        self.is_in_vain, self.started = is_in_vain, 0
        self.ended: list[Ended] = []

    def start(self) -> None:
        self.started += 1
        if self.is_in_vain:
            self.ended.append(Ended(f"worker-{self.started}", f"worker-{self.started} fell"))

    def poll(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended

    def starves(self, worker: str) -> bool:
        return worker in self.starving

    def waits_for(self) -> str | None:
        return self.lacks

    def end(self, worker: str) -> None:
        """Nothing is there to end."""

    def close(self) -> None:
        """Nothing is there to end."""


def config(folder: Path, replicas: int = 1, **cluster) -> Config:
    return Config.from_mapping(
        {
            "model": MODEL,
            "batch": {"size": 4, "micro": 1},
            "engine": {"device": "cpu", "threads": 1},
            "engines": 2,
            "store": {"shards": 2, "replicas": replicas},
            "run": {"dir": str(folder)},
            "cluster": {"start": "local", "spare": 1, **cluster},
        }
    )


@pytest.fixture(scope="module")
def layout(tmp_path_factory) -> Layout:
    made = config(tmp_path_factory.mktemp("layout"))
    assert made.model is not None
    return lay_out(made, assembly.model_source(made.model), "cpu", 16)


class Visited:
    """A hall, and what was told of it by which thread."""

    def __init__(self, folder: Path, layout: Layout, is_in_vain: bool, **cluster) -> None:
        self.told: list[str] = []
        self.tellers: set[threading.Thread] = set()
        self.is_stopped = False
        self.launcher = PretendLauncher(is_in_vain)
        self.hall = Hall(
            config(folder, **cluster),
            layout,
            host="127.0.0.1",
            token=TOKEN,
            launch=lambda endpoint: self.launcher,
            tell=self.hear,
            should_stop=lambda: self.is_stopped,
        )

    def hear(self, event) -> None:
        self.told.append(event.kind)
        self.tellers.add(threading.current_thread())


class Guest:
    """One who joins, and what is said to it."""

    def __init__(self, hall: Hall) -> None:
        self.said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.failures: list[Exception] = []
        self.endpoint = Endpoint(
            TOKEN,
            "127.0.0.1",
            on_link_end=lambda link, error: None,
            on_stranger=lambda link, message: self.said.put(message),
            on_failure=self.failures.append,
        )
        self.endpoint.start()
        self.link: Link = self.endpoint.connect(hall.address)

    def say(self, kind: Kind, number: int = 0, **body) -> None:
        self.link.send(Message(kind, 0, number, body=body))

    def hear(self) -> Message:
        return self.said.get(timeout=10)


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def visit(tmp_path, layout) -> Iterator:
    made: list[Visited] = []
    guests: list[Guest] = []

    def open_hall(is_in_vain: bool = False, **cluster) -> Visited:
        made.append(Visited(tmp_path, layout, is_in_vain, **cluster))
        return made[-1]

    def join(visited: Visited, **says) -> tuple[Guest, Message]:
        guests.append(Guest(visited.hall))
        guests[-1].say(Kind.JOIN, worker=f"guest-{len(guests)}", listens=["127.0.0.1", 1], **says)
        return guests[-1], guests[-1].hear()

    open_hall.join = join
    yield open_hall
    for guest in guests:
        guest.endpoint.close()
        assert not guest.failures
    for visited in made:
        visited.hall.close()


def test_so_many_workers_are_started_as_engines_spare_ones_and_shards_apart(visit):
    assert visit().launcher.started == 3
    assert visit(shards="apart").launcher.started == 5


def test_a_run_whose_workers_all_end_before_they_are_shards_ends_and_says_so(visit):
    visited = visit(is_in_vain=True, shards="apart")
    with pytest.raises(
        ClusterError, match=r"in a row ended before they could compute, .*; worker-"
    ):
        visited.hall.remote_shards()
    visited.hall.close()
    assert {"worker ended", "not replaced"} <= {*visited.told}
    assert visited.tellers == {threading.current_thread()}


def test_a_run_whose_workers_all_end_before_they_are_engines_ends_and_says_so(visit):
    visited = visit(is_in_vain=True)
    with pytest.raises(
        ClusterError, match=r"in a row ended before they could compute, .*; worker-"
    ):
        visited.hall.await_engines()


def test_a_place_of_a_shard_for_which_nobody_comes_ends_a_run_that_has_engines(visit):
    visited = visit(start="listen", shards="apart", lease=10.0)
    guest, welcome = visit.join(visited)
    guest.say(Kind.READY, welcome.body["node"], digest=visited.hall._digest)
    until(lambda: visited.hall.conductor.ready)
    visited.launcher.ended = [Ended(f"worker-{n}", f"worker-{n} fell") for n in range(3)]
    with pytest.raises(ClusterError, match=r"3 workers in a row ended before .*; worker-2 fell"):
        visited.hall.remote_shards()
    assert len(visited.hall.conductor.ready) == 1


def test_a_stop_ends_waiting_for_engines(visit):
    visited = visit()
    visited.is_stopped = True
    with pytest.raises(InterruptedError):
        visited.hall.await_engines()


def test_places_of_shards_are_given_first_then_those_of_engines(visit):
    visited = visit(shards="apart")
    given = [visit.join(visited)[1].body for _ in range(3)]
    assert [body["place"] for body in given] == [[0, 0], [1, 0], None]
    assert [body["node"] for body in given] == [1, 2, 1000]
    assert {body["opens"] for body in given} == {"when asked"}


def test_a_replica_that_is_lost_leaves_its_place_to_a_newcomer_that_waits_for_a_copy(visit):
    visited = visit(shards="apart", replicas=2, lease=60.0)
    assert visited.launcher.started == 7
    joined = [visit.join(visited) for _ in range(7)]
    # On one host: a shard's second place is given when no engine is wanted any more.
    places = [welcome.body["place"] for _, welcome in joined]
    assert places == [[0, 0], [1, 0], None, None, None, [0, 1], [1, 1]]
    for guest, welcome in joined:
        guest.say(Kind.READY, welcome.body["node"], digest=visited.hall._digest)
    until(lambda: not visited.hall._places.are_missing)
    until(lambda: len(visited.hall.conductor.ready) == 3)
    assert visited.hall.conductor.holders == ((1, 3), (2, 4))
    joined[1][0].link.close()
    until(lambda: visited.hall.conductor.holders == ((1, 3), (4,)))
    guest, welcome = visit.join(visited)
    assert (welcome.body["place"], welcome.body["opens"]) == ([1, 0], "empty")
    node = welcome.body["node"]
    guest.say(Kind.READY, node, digest=visited.hall._digest)
    until(lambda: visited.hall._places.newcomers == [(1, node)])
    assert visited.hall.conductor.holders == ((1, 3), (4,))  # until it has its copy
    guest.link.close()
    until(lambda: not visited.hall._places.newcomers)
    visited.hall.look()
    assert visited.told.count("replica lost") == 2
    assert visit.join(visited)[1].body["place"] == [1, 0]


def test_a_newcomer_that_cannot_be_made_does_not_end_the_run(visit):
    visited = visit(shards="apart", replicas=2, lease=60.0)
    joined = [visit.join(visited) for _ in range(7)]
    for guest, welcome in joined:
        guest.say(Kind.READY, welcome.body["node"], digest=visited.hall._digest)
    until(lambda: not visited.hall._places.are_missing)
    joined[0][0].link.close()
    until(lambda: visited.hall.conductor.holders[0] == (3,))
    guest, welcome = visit.join(visited)
    text = {"error": "StorageError", "text": "no space left"}
    guest.say(Kind.TROUBLE, welcome.body["node"], **text)
    assert guest.hear().kind is Kind.ANSWER
    visited.hall.look()
    assert "refused" in visited.told


def test_who_leaves_before_it_is_ready_leaves_its_place_to_the_next(visit):
    visited = visit(shards="apart")
    guest, first = visit.join(visited)
    assert first.body["place"] == [0, 0]
    guest.link.close()
    until(lambda: not visited.hall._joining)
    assert visit.join(visited)[1].body["place"] == [0, 0]


def test_a_shard_that_is_not_wanted_is_told_so_and_the_run_goes_on(visit):
    visited = visit(start="listen", shards="apart")
    assert visit.join(visited, shard=1)[1].body["place"] == [1, 0]
    answer = visit.join(visited, shard=1)[1]
    assert answer.kind is Kind.ANSWER
    assert answer.body["error"] == "shard 1 of the store is not wanted: it is there"
    visited.hall.look()
    assert visited.told == ["refused"]


@pytest.mark.parametrize("shards", ["here", "apart"])
def test_who_has_compiled_another_program_is_told_so_and_the_run_needs_it(visit, shards):
    visited = visit(shards=shards)
    guest, welcome = visit.join(visited)
    guest.say(Kind.READY, welcome.body["node"], digest="another")
    answer = guest.hear()
    assert answer.kind is Kind.ANSWER
    assert "has compiled another program: are its versions the same?" in answer.body["error"]
    with pytest.raises(ClusterError, match="another program"):
        visited.hall.look()
    assert visited.told == ["refused"]


def test_what_keeps_a_worker_from_being_made_is_raised_as_what_it_was_there(visit):
    visited = visit(shards="apart")
    guest, welcome = visit.join(visited)
    text = {"error": "ConfigError", "text": "model.hf: is not on this host"}
    guest.say(Kind.TROUBLE, welcome.body["node"], **text)
    assert guest.hear().kind is Kind.ANSWER
    with pytest.raises(ConfigError, match=r"shard 0 could not be made: model\.hf: is not on"):
        visited.hall.remote_shards()


@pytest.mark.parametrize("engines", [0, 5, "2", None])
def test_a_number_of_engines_that_cannot_be_is_refused(visit, engines):
    with pytest.raises(ClusterError, match=r"expected 1 .* to 4 \(one micro-batch each\), got"):
        visit().hall.scale(engines)


def test_more_engines_are_started_beside_the_shards(visit):
    visited = visit(shards="apart")
    visited.hall.scale(4)
    assert visited.launcher.started == 7
    visited.hall.scale(1)
    visited.hall.scale(3)
    assert visited.launcher.started == 7


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("penstock")}


class FailingLauncher(PretendLauncher):
    """Starts one worker, and then something goes wrong that nobody has foreseen."""

    is_closed = False

    def start(self) -> None:
        super().start()
        if self.started == 2:
            raise RuntimeError("the second worker broke the launcher")

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("fails", ["making the launcher", "starting workers"])
def test_a_hall_that_cannot_be_opened_leaves_nothing(tmp_path, layout, fails):
    before = ours()
    launcher, addresses = FailingLauncher(False), []

    def launch(endpoint: Endpoint) -> FailingLauncher:
        addresses.append(endpoint.address)
        assert (tmp_path / "cluster.json").exists()
        if fails == "making the launcher":
            raise RuntimeError("no launcher")
        return launcher

    with pytest.raises(RuntimeError):
        Hall(
            config(tmp_path),
            layout,
            host="127.0.0.1",
            token=TOKEN,
            launch=launch,
            tell=lambda event: None,
            should_stop=lambda: False,
        )
    until(lambda: not ours() - before)
    assert not (tmp_path / "cluster.json").exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[0], timeout=1)
    assert launcher.is_closed == (fails == "starting workers")


class PretendLink:
    """A link that leads nowhere."""

    def __init__(self, *nodes: int) -> None:
        self.peer = nodes[0] if nodes else None
        self.nodes = set(nodes)
        self.sent_bytes = self.taken_bytes = 0
        self.refused: list[Exception | None] = []

    def send(self, message: Message) -> None:
        """Nobody is there."""

    def close(self, why: Exception | None = None) -> None:
        self.refused.append(why)


def hand_in(hall: Hall, link: PretendLink, *messages: Message) -> None:
    """Have messages taken as if they had come over a link that then ends."""

    def take() -> None:
        for message in messages:
            hall._endpoint._route(link, message)
        hall._link_ended(link, ConnectionError())

    hall._do(take)


@pytest.fixture(scope="module")
def open_for_all(tmp_path_factory, layout) -> Iterator[Hall]:
    visited = Visited(
        tmp_path_factory.mktemp("all"), layout, False, start="listen", shards="apart", lease=3600.0
    )
    guests = [Guest(visited.hall) for _ in range(4)]
    for number, guest in enumerate(guests):  # two shards and an engine that stay; one that joins
        says = {"shard": number} if number < 2 else {}
        guest.say(Kind.JOIN, worker=f"guest-{number}", listens=["127.0.0.1", 1], **says)
        welcome = guest.hear()
        if number < 3:
            guest.say(Kind.READY, welcome.body["node"], digest=visited.hall._digest)
    until(lambda: visited.hall.conductor.ready and not visited.hall._places.are_missing)
    yield visited.hall
    for guest in guests:
        guest.endpoint.close()
    visited.hall.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(messages([0, 1, 2, 1000, 7]), max_size=5), st.sampled_from([None, 1, 1000, 7]))
def test_no_message_can_end_the_endpoint_of_a_run(open_for_all, received, peer):
    """Of strangers, of those who are about to join, and of nodes of the run."""
    link = PretendLink() if peer is None else PretendLink(peer)
    join = Message(Kind.JOIN, 0, 0, body={"worker": "w", "listens": ["127.0.0.1", 1]})
    also = [dataclasses.replace(message, sender=peer or 0) for message in received]
    hand_in(open_for_all, link, *([] if peer else [join]), *received, *also)
    # Whoever lost its place by it may have been one that the run cannot do without.
    failed, open_for_all._failed = open_for_all._failed, None
    assert "network failed" not in str(failed)
    assert open_for_all._endpoint._threads[0].is_alive()
    assert all(isinstance(why, ProtocolError) for why in link.refused)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message(Kind.JOIN, 0, 0), "says 'None' for 'worker'"),
        (Message(Kind.JOIN, 0, 0, body={"worker": "w"}), "says 'None' for an address"),
        (
            Message(Kind.JOIN, 0, 0, body={"worker": "w", "listens": ["h", 70000]}),
            "says .* for an address",
        ),
        (
            Message(Kind.JOIN, 0, 0, body={"worker": "w", "listens": ["h", 1], "shard": "0"}),
            "says '0' for 'shard'",
        ),
        (Message(Kind.HELLO, 0, 0, body={"node": "1"}), "says that it is node '1'"),
    ],
)
def test_a_stranger_that_makes_no_sense_is_cut_off(open_for_all, message, text):
    link = PretendLink()
    hand_in(open_for_all, link, message)
    (why,) = link.refused
    assert isinstance(why, ProtocolError)
    assert re.search(text, str(why))


def test_who_speaks_in_the_name_of_another_is_cut_off(open_for_all):
    link = PretendLink(7)
    trouble = {"error": "StorageError", "text": "I am shard 0, and broken"}
    hand_in(open_for_all, link, Message(Kind.TROUBLE, 0, 1, body=trouble))
    assert "node 7 sent a TROUBLE message in the name of node 1" in str(link.refused[0])
    open_for_all.require_sound()


class PretendWork:
    """Nothing is computed and nothing kept."""

    store = None

    def __getattr__(self, name: str) -> Callable:
        return lambda *arguments: None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(messages([0, 1, 1000, 7]), max_size=6), st.booleans())
def test_no_message_can_end_the_endpoint_of_a_worker(open_for_all, received, is_shard):
    plan, work = open_for_all._transfers, PretendWork()
    endpoint = PretendEndpoint()
    runtime = RuntimeOf(endpoint, 1)
    if is_shard:
        member = ShardMember(ShardNode(1, 0, runtime, plan, work), endpoint, work)
    else:
        member = Member(EngineNode(1000, runtime, plan, work), endpoint)
    for message in received:
        with contextlib.suppress(ProtocolError, CorruptionError):  # the endpoint cuts these off
            member.handle(message)
        with contextlib.suppress(ProtocolError):
            Welcome.read(message)


class PretendEndpoint:
    """Carries nothing and does all work at once."""

    def send(self, sender: int, to: int, message: Message) -> None:
        """Nobody is there."""

    def work(self, number: int, job: Callable, then: Callable, failed: Callable) -> None:
        try:
            result = job()
        except Exception as error:
            failed(error)
        else:
            then(result)

    def runtime(self, number: int) -> RuntimeOf:
        return RuntimeOf(self, number)

    def meet(self, addresses: dict) -> None:
        assert all(isinstance(number, int) for number in addresses)


def test_a_worker_that_waits_for_a_processor_is_not_lost_before_ten_leases(visit):
    visited = visit(start="local", lease=0.2)
    guest, welcome = visit.join(visited)
    visited.launcher.starving = ("guest-1",)
    guest.say(Kind.READY, welcome.body["node"], digest=visited.hall._digest)
    until(lambda: visited.hall.conductor.ready)
    began = time.monotonic()
    until(lambda: not visited.hall.conductor.ready)  # it never says a word
    assert time.monotonic() - began > 1.0


def test_a_process_that_would_run_is_told_from_one_that_sleeps_or_is_stopped(tmp_path):
    spin = "while True: pass"
    for code, states in ((spin, "R"), ("import time; time.sleep(60)", "S")):
        with subprocess.Popen([sys.executable, "-c", code]) as process:
            until(lambda p=process, s=states: thread_states(p.pid) == [s])
            process.send_signal(signal.SIGSTOP)
            until(lambda p=process: thread_states(p.pid) == ["T"])
            process.kill()
        assert thread_states(process.pid) == []


def test_a_worker_that_is_cut_off_before_it_is_anything_ends_and_says_so():
    run = Endpoint(
        TOKEN,
        "127.0.0.1",
        on_link_end=lambda link, error: None,
        on_stranger=lambda link, message: link.close(),
        on_failure=lambda error: None,
    )
    run.start()
    try:
        with pytest.raises(ClusterError, match="the run ended the connection before it said what"):
            Worker(run.address, TOKEN).serve()
    finally:
        run.close()
