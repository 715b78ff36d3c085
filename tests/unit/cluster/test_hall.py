"""Who is let in and who is sent away, and when a run ends because nobody comes; no processes."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import assembly
from penstock.cluster.hall import Hall
from penstock.cluster.launch import Ended
from penstock.config import Config
from penstock.errors import ClusterError, ConfigError
from penstock.fabric.messages import Kind, Message
from penstock.fabric.sockets import Endpoint, Link
from penstock.step_layout import Layout, lay_out

MODEL = {
    "preset": "gpt2",
    "overrides": {"n_layer": 1, "n_embd": 32, "n_head": 1, "vocab_size": 96, "n_positions": 16},
}
TOKEN = "a token"


class PretendLauncher:
    """Starts nobody; those whom it has started have ended, if it is told so."""

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

    def end(self, worker: str) -> None:
        """Nothing is there to end."""

    def close(self) -> None:
        """Nothing is there to end."""


def config(folder: Path, **cluster) -> Config:
    return Config.from_mapping(
        {
            "model": MODEL,
            "batch": {"size": 4, "micro": 1},
            "engine": {"device": "cpu", "threads": 1},
            "engines": 2,
            "store": {"shards": 2},
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
    assert [body["shard"] for body in given] == [0, 1, None]
    assert [body["node"] for body in given] == [1, 2, 1000]
    assert not any(body["reopen"] for body in given)


def test_who_leaves_before_it_is_ready_leaves_its_place_to_the_next(visit):
    visited = visit(shards="apart")
    guest, first = visit.join(visited)
    assert first.body["shard"] == 0
    guest.link.close()
    until(lambda: not visited.hall._joining)
    assert visit.join(visited)[1].body["shard"] == 0


def test_a_shard_that_is_not_wanted_is_told_so_and_the_run_goes_on(visit):
    visited = visit(start="listen", shards="apart")
    assert visit.join(visited, shard=1)[1].body["shard"] == 1
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
