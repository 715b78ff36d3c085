"""Shards with replicas as the trainer's process sees them: copies, losses meanwhile, stops.

The nodes are real stores that answer calls in this process; who is lost when, the test says.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sharded_stores import assert_same_state
from store_programs import (
    LAYERS,
    flash_store,
    forward_sweep,
    make_program,
    random_weights,
    train,
    training_store,
)

from penstock.cluster import copy_ends, store_calls
from penstock.cluster.calls import Said, ShardLostError, error_class
from penstock.cluster.copy_ends import Giver, Taker
from penstock.cluster.shard_places import Place
from penstock.cluster.shards_apart import House, ShardsApart
from penstock.config import Config
from penstock.errors import ClusterError, ConfigError, CorruptionError, StorageError
from penstock.fabric.messages import Kind, Message
from penstock.store import AdamW
from penstock.store.flash.shards import durable_records

EIGHT_BIT = AdamW(0.9, 0.95, 1e-8, moments="8bit")
PROGRAM = make_program(LAYERS, frozen=("position",), stream_dtype=torch.bfloat16)


class Kept:
    """Where a node's store is: it is open already."""

    def __init__(self, stores: dict[int, object], node: int) -> None:
        self._stores, self._node = stores, node

    @property
    def store(self):
        return self._stores[self._node]

    def open(self, must_hold: bool = False):
        return self.store

    def close(self) -> None:
        self.store.close()


class Nodes:
    """Nodes that answer calls, and send each other what they copy, one thing after the other.

    Something may happen before the so-many-th call of a method, or message of a kind, at a node.
    """

    address = ("127.0.0.1", 9)

    def __init__(self, stores: dict[int, object]) -> None:
        self.stores = stores
        self.came: Counter[tuple[int, str]] = Counter()
        self.says: dict[tuple[int, str], Said] = {}
        self.before: dict[tuple[int, str, int], Callable[[], object]] = {}
        self.gone: set[int] = set()
        self.todo: deque[Callable[[], object]] = deque()
        self.answers: dict[int, Said] = {}
        self.called_with_arrays = 0
        self.ends: dict[int, tuple[Giver, Taker]] = {}
        self.reached: set[tuple[int, int]] = set()
        self.most_waiting = 0

    def of(self, node: int) -> tuple[Giver, Taker]:
        """The two ends of copies at a node."""
        if node not in self.ends:
            place, network = Kept(self.stores, node), _NetworkOf(self, node)
            self.ends[node] = (
                Giver(node, place, network, network),
                Taker(node, place, network, network, self.answers.__setitem__),
            )
        return self.ends[node]

    def comes(self, node: int, what: str) -> None:
        self.came[node, what] += 1
        self.before.pop((node, what, self.came[node, what]), lambda: None)()

    def deliver(self, sender: int, to: int, message: Message) -> None:
        if self.gone & {sender, to}:
            return
        self.comes(to, message.kind.name)
        if self.gone & {sender, to}:
            return
        giver, taker = self.of(to)
        (giver if message.kind is Kind.COPY else taker).take(message)
        asked = sum(n for (_, what), n in self.came.items() if what == "COPY")
        written = sum(n for (_, what), n in self.came.items() if what == "written")
        self.most_waiting = max(self.most_waiting, asked - written)

    def ask(self, node, method, arguments, arrays, most=0) -> Said:
        return self.begin(node, method, arguments, arrays, most).answer()

    def begin(self, node, method, arguments, arrays, most=0):
        self.comes(node, method)
        self.called_with_arrays += bool(arrays)
        number = sum(self.came.values())
        said = Said({"method": method, "with": arguments}, arrays)
        if node in self.gone:
            pass
        elif (node, method) in self.says:
            self.answers[number] = self.says[node, method]
        elif method == "take_copy":
            self.of(node)[1].begin(number, arguments)
        elif method == "give_up_copy":
            self.of(node)[1].give_up("the run's process said so")
            self.answers[number] = Said()

        def answer(meanwhile=lambda: None) -> Said:
            while number not in self.answers:
                if node in self.gone:
                    raise ShardLostError(f"node {node} was lost")
                if method != "take_copy":
                    self.answers[number] = store_calls.answer(Kept(self.stores, node), said)
                elif self.todo:
                    self.todo.popleft()()
                    meanwhile()
                else:
                    meanwhile()
                    assert node in self.gone or number in self.answers, "nothing moves"
            done = self.answers[number]
            if "error" in done.body:
                raise error_class(done.body["error"])(done.body["text"])
            assert sum(array.nbytes for array in done.arrays.values()) <= most
            return done

        return SimpleNamespace(node=node, method=method, answer=answer)

    def lost(self, node, why) -> None:
        self.gone.add(node)


class _NetworkOf:
    """What carries a node's messages and does its work: both in turn, when somebody waits."""

    address = Nodes.address

    def __init__(self, nodes: Nodes, node: int) -> None:
        self._nodes, self._node = nodes, node

    def reach(self, number: int, address) -> None:
        assert address == self.address
        self._nodes.reached.add((self._node, number))

    def send(self, to: int, message: Message) -> None:
        assert (self._node, to) in self._nodes.reached
        self._nodes.todo.append(lambda: self._nodes.deliver(self._node, to, message))

    def work(self, job, then, failed) -> None:
        def do() -> None:
            if self._node in self._nodes.gone:
                return
            try:
                found = job()
            except Exception as error:
                failed(error)
            else:
                if "write" in getattr(job, "__qualname__", ""):
                    self._nodes.came[self._node, "written"] += 1
                then(found)

        self._nodes.todo.append(do)


class Conductor:
    """Says who is whole; all who were asked for are."""

    is_agreed = True

    def __init__(self) -> None:
        self.lost_nodes: list[int] = []

    def whole(self, node) -> bool:
        return node not in self.lost_nodes

    def lost(self, node, why) -> None:
        self.lost_nodes.append(node)


class Run:
    """The one shard of a run, held by nodes 1 and 2; node 3 comes when one of them is lost."""

    def __init__(self, make, **store) -> None:
        self.stores = {1: make(1), 2: make(2)}
        self.make = make
        self.said: list[tuple[str, str]] = []
        self.failed: list[Exception] = []
        self.is_stopped = False
        self.conductor = Conductor()
        self.calls = Nodes(self.stores)
        house = House(
            self.conductor,
            lambda kind, text, node=None: self.said.append((kind, text)),
            self.failed.append,
            self.look,
            lambda action: action(),
            lambda: self.is_stopped,
            lambda node: None if node in self.calls.gone else self.calls.address,
        )
        config = Config.from_mapping(
            {
                "model": "gpt2",
                "cluster": {"start": "local", "shards": "apart"},
                "store": {"replicas": 2, **store},
            }
        )
        self.apart = ShardsApart(config, [PROGRAM], self.calls, house)
        for node in (1, 2):
            self.apart.places.take(Place(0, node - 1), node)
        (self.shard,) = self.apart.remote()
        self.shard.open()

    def look(self) -> None:
        if self.failed:
            raise self.failed[0]

    def lose(self, node: int) -> None:
        place = Place(0, self.stores[node].number)
        self.conductor.lost_nodes.append(node)
        self.apart.lost(place, node)

    def come(self, node: int, replica: int) -> None:
        """A newcomer takes a place, with nothing."""
        self.stores[node] = self.make(node, replica)
        self.apart.places.wait_for_copy(Place(0, replica), node)

    def copy(self, on_flash=None) -> None:
        self.apart.copy_to_newcomers(on_flash)

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.apart.places.nodes(0)


@pytest.fixture
def in_memory():
    def make(node, replica=None):
        store = training_store(PROGRAM, "bf16", optimizer=EIGHT_BIT)
        store.number = node - 1 if replica is None else replica
        return store

    return Run(make)


@pytest.fixture
def on_flash(tmp_path):
    made = []

    def make(node, replica=None):
        folder = Path(tmp_path) / f"node-{node}"
        made.append(flash_store(PROGRAM, folder, optimizer=EIGHT_BIT))
        made[-1].number = node - 1 if replica is None else replica
        return made[-1]

    yield Run(make, flash={"path": str(tmp_path)})
    for store in made:
        store.close()


@pytest.fixture(params=["in memory", "on flash"])
def run(request):
    return request.getfixturevalue(request.param.replace(" ", "_"))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(copy_ends, "PORTION_BYTES", 1_000)  # several of the larger weights


def trained(run: Run, steps: int = 2) -> Run:
    """Fill the shard, and have each node do what it would do in a step."""
    run.shard.load(random_weights(PROGRAM, 0).items())
    for store in run.stores.values():
        train(store, steps, seed=3)
    return run


def test_what_is_loaded_goes_to_both_and_a_newcomer_gets_every_bit(run):
    trained(run)
    assert_same_state(run.stores[1], run.stores[2])
    run.lose(1)
    run.come(3, 0)
    run.copy()
    assert run.nodes == (2, 3)
    assert_same_state(run.stores[3], run.stores[2])
    ((kind, text),) = run.said
    assert kind == "replica copied"
    assert "the replica of shard 0 is whole: node 3 was given the" in text
    for store in (run.stores[2], run.stores[3]):
        train(store, 2, seed=5)
    assert_same_state(run.stores[3], run.stores[2])


def test_a_newcomer_on_flash_holds_the_step_and_what_is_kept_with_it_durably(on_flash):
    run = trained(on_flash)
    run.shard.remember({"best": 3})
    run.lose(1)
    run.come(3, 0)
    run.copy(run.shard)
    assert run.stores[3].durable_steps == [2]
    assert run.stores[3].extra == run.stores[2].extra == {"best": 3}
    assert run.stores[2].durable_step == 2  # the same, before it is copied
    for store in (run.stores[2], run.stores[3]):
        train(store, 1, seed=5)
        store.make_durable()
    # So that a run that opens both again sees by these checksums that they are the same.
    ours, theirs = (durable_records(run.stores[node].folder) for node in (2, 3))
    assert [record.blob for record in ours] == [record.blob for record in theirs]


@pytest.mark.parametrize(
    ("what", "times"),
    [("take_copy", 1), ("PORTION", 1), ("PORTION", 5), ("checksum", 1), ("finish_restore", 1)],
)
def test_a_newcomer_that_is_lost_during_the_copy_makes_room_for_the_next(run, what, times):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    run.calls.before[3, what, times] = lambda: run.lose(3)
    run.copy()
    assert run.nodes == (2,)
    run.come(5, 0)
    run.copy()
    assert run.nodes == (2, 5)
    assert_same_state(run.stores[5], run.stores[2])
    assert not run.failed


def test_on_flash_the_one_that_is_copied_may_be_lost_and_the_copy_begins_anew(on_flash):
    run = trained(on_flash)
    run.lose(1)
    run.come(3, 0)
    run.calls.before[2, "COPY", 4] = lambda: run.lose(2)
    run.copy()
    assert run.nodes == ()
    run.copy()  # nobody is there
    run.stores[4] = run.stores[2]
    run.apart.places.take(Place(0, 1), 4)  # another process has opened what that had stored
    run.copy()
    assert run.nodes == (4, 3)
    assert_same_state(run.stores[3], run.stores[4])


def test_in_memory_the_run_ends_if_the_one_that_is_copied_is_lost(in_memory):
    run = trained(in_memory)
    run.lose(1)
    run.come(3, 0)
    run.calls.before[2, "COPY", 4] = lambda: run.lose(2)
    run.copy()
    assert run.nodes == ()
    with pytest.raises(StorageError, match="goes on from the last checkpoint"):
        run.shard.take_traffic()


def test_a_newcomer_that_cannot_take_it_is_refused_and_none_is_asked_for_again(run, monkeypatch):
    trained(run)
    run.lose(1)
    run.come(3, 0)

    def full(number, data):
        raise StorageError("no space left on node 3")

    with_changed_portions(run.stores[3], monkeypatch, write=full)
    run.copy()
    assert run.nodes == (2,)
    assert run.said == [
        (
            "replica refused",
            "shard 0 goes on without a replica, node 3 cannot be one: no space left on node 3",
        )
    ]
    assert run.conductor.lost_nodes == [1, 3]
    run.apart.lost(Place(0, 0), 3)  # as its link ends
    assert not run.apart.places.free([])
    assert run.apart.places.given_up == 1


def test_a_stop_during_the_copy_ends_it_and_harms_nobody(run):
    trained(run)
    run.lose(2)
    run.come(3, 1)
    run.calls.before[3, "PORTION", 2] = lambda: setattr(run, "is_stopped", True)
    with pytest.raises(InterruptedError, match="stopped while a shard of the store was copied"):
        run.copy()
    assert run.nodes == (1,)
    asked = run.calls.came[1, "COPY"]
    while run.calls.todo:  # what was on its way comes, and nobody asks for more
        run.calls.todo.popleft()()
    assert run.calls.came[1, "COPY"] <= asked + copy_ends.WINDOW
    assert run.calls.came[3, "give_up_copy"] == 1
    assert run.shard.content_hash() == run.stores[1].content_hash()


def with_changed_portions(store, monkeypatch, **changed) -> None:
    """Let the portions of a store do something else for these methods."""
    made = store.portions

    def portions(portion_bytes):
        found = made(portion_bytes)
        for name, change in changed.items():
            monkeypatch.setattr(found, name, change)
        return found

    monkeypatch.setattr(store, "portions", portions)


def test_what_is_copied_does_not_come_to_the_run_and_few_portions_are_on_their_way(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    before = run.calls.called_with_arrays
    run.copy()
    assert run.nodes == (2, 3)
    assert run.calls.called_with_arrays == before
    assert not [key for key in run.calls.came if key[1] in ("read",)]
    assert run.calls.came[2, "COPY"] > 3 * copy_ends.WINDOW  # so that this says something
    assert run.calls.most_waiting <= copy_ends.WINDOW


def test_what_came_otherwise_than_it_was_sent_is_copied_again(run, monkeypatch):
    """Whatever the links say: the checksums of all that both hold are what counts."""
    trained(run)
    run.lose(1)
    run.come(3, 0)
    store, flips = run.stores[3], [1]
    made = store.portions

    def portions(portion_bytes):
        found = made(portion_bytes)
        write = found.write

        def flipping(number, data):
            changed = np.array(data)
            if flips and number == 7:
                changed[flips.pop()] ^= 4
            write(number, changed)

        monkeypatch.setattr(found, "write", flipping)
        return found

    monkeypatch.setattr(store, "portions", portions)
    run.copy()
    assert run.nodes == (2, 3)
    assert_same_state(run.stores[3], run.stores[2])
    again, copied = run.said
    assert again[0] == "replica copied again"
    assert "what node 3 was given has checksum" in again[1]
    assert copied[0] == "replica copied"


def test_a_copy_that_breaks_again_and_again_is_refused(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    taker = run.calls.of(3)[1]
    for count in (3, 6, 9):
        run.calls.before[3, "PORTION", count] = lambda: taker.link_ended(2, "a cable was cut")
    run.copy()
    assert run.nodes == (2,)
    assert [kind for kind, _ in run.said] == [*["replica copied again"] * 2, "replica refused"]
    assert "3 copies in a row broke, the last one: from node 2 to node 3: the" in run.said[2][1]
    assert not run.failed


def test_a_link_to_somebody_else_that_ends_or_a_portion_that_comes_late_breaks_no_copy(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    taker = run.calls.of(3)[1]
    stale = Message(Kind.PORTION, 0, 2, op=0, index=77)
    run.calls.before[3, "PORTION", 3] = lambda: (taker.link_ended(9, "gone"), taker.take(stale))
    run.copy()
    assert run.nodes == (2, 3)
    assert [kind for kind, _ in run.said] == ["replica copied"]


def test_a_copy_of_which_nothing_comes_is_begun_anew(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    taker = run.calls.of(3)[1]
    late = time.monotonic() + copy_ends.SILENCE
    run.calls.before[3, "PORTION", 2] = lambda: (taker.tick(late - 30), taker.tick(late + 30))
    run.copy()
    assert run.nodes == (2, 3)
    assert "node 2 to node 3: nothing came for 60 s" in run.said[0][1]
    assert_same_state(run.stores[3], run.stores[2])


def test_a_node_that_cannot_read_what_it_holds_ends_the_copy_with_its_own_error(run, monkeypatch):
    trained(run)
    run.lose(1)
    run.come(3, 0)

    def damaged(number):
        raise CorruptionError("extents: damaged in bytes 0 to 9")

    with_changed_portions(run.stores[2], monkeypatch, read=damaged)
    with pytest.raises(CorruptionError, match=r"node 2: extents: damaged in bytes 0 to 9"):
        run.copy()
    assert run.nodes == (2,)


def test_a_node_that_goes_on_while_it_is_copied_ends_the_copy(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    run.calls.before[2, "COPY", 6] = lambda: train(run.stores[2], 1, seed=8)
    with pytest.raises(ClusterError, match="node 2: it went from step 2 to step 3 while it was"):
        run.copy()
    assert run.nodes == (2,)


@pytest.mark.parametrize(
    ("node", "method", "says"),
    [
        (2, "status", {"step": "two"}),
        (2, "checksum", {}),
        (3, "checksum", {"checksum": 7}),
        (3, "take_copy", {"copied": True}),
    ],
)
def test_a_node_whose_answer_makes_no_sense_loses_its_place(in_memory, node, method, says):
    run = trained(in_memory)
    run.lose(1)
    run.come(3, 0)
    run.calls.says[node, method] = Said(says)
    run.copy()
    assert run.nodes == (2,)  # until it is lost, if it is that
    assert run.conductor.lost_nodes == [1, node]


@pytest.mark.parametrize(
    "given", [None, {}, {"source": 2, "step": 1}, {"source": 2, "step": 1, "listens": ["h", 0]}]
)
def test_a_copy_of_nobody_is_refused(in_memory, given):
    taker = in_memory.calls.of(2)[1]
    with pytest.raises(ClusterError, match="which is no node"):
        taker.begin(1, given)


def test_without_a_newcomer_or_an_agreement_nothing_is_copied(run):
    trained(run)
    run.copy()
    run.lose(1)
    run.come(3, 0)
    run.conductor.is_agreed = False
    run.copy()
    assert run.nodes == (2,)
    assert not run.said


def test_reading_goes_on_with_the_other_and_what_changes_the_shard_goes_to_who_is_left(run):
    trained(run)
    name = "block.0.weight"
    expected = run.stores[1].master(name)
    run.calls.before[1, "read", 1] = lambda: run.lose(1)
    assert torch.equal(run.shard.master(name), expected)
    assert run.calls.came[2, "read"] == 1
    run.shard.remember({"best": 4})
    run.shard.discard()
    assert run.calls.came[2, "remember"] == run.calls.came[2, "discard"] == 1


def test_a_store_that_holds_nothing_of_what_the_other_holds_is_given_a_copy_when_it_is_opened(
    on_flash,
):
    run = trained(on_flash)
    run.stores[2].close()
    run.stores[2] = run.make(5, 1)  # its folder was deleted
    run.shard.open()
    assert_same_state(run.stores[2], run.stores[1])


def test_sizes_and_traffic_are_those_of_all(run):
    trained(run)
    assert run.shard.memory_bytes == {k: 2 * v for k, v in run.stores[1].memory_bytes.items()}
    assert run.shard.flash_bytes == 2 * run.stores[1].flash_bytes
    run.shard.take_traffic()
    forward_sweep(run.stores[1])
    train(run.stores[2], 1, seed=1)
    taken = run.shard.take_traffic()
    trained_bytes = 4 * sum(
        PROGRAM.weights[name].elements
        for stage in PROGRAM.stages
        for name in stage.weights
        if PROGRAM.weights[name].trainable
    )
    assert taken.gradient_bytes == trained_bytes
    assert taken.streamed_bytes >= sum(map(PROGRAM.stage_stream_bytes, PROGRAM.stages))


def test_the_last_one_that_is_lost_ends_a_run_in_memory_and_says_how_to_go_on(in_memory):
    run = trained(in_memory)
    run.lose(1)
    assert not run.failed
    run.lose(2)
    with pytest.raises(StorageError, match=r"shard 0 of the store was lost, .* the last checkpoi"):
        run.shard.take_traffic()


def test_a_stop_while_nobody_holds_a_shard_on_flash_is_answered(on_flash):
    run = trained(on_flash)
    run.lose(1)
    run.lose(2)
    run.is_stopped = True
    with pytest.raises(StorageError, match="stopped while a shard of the store was lost; give the"):
        run.shard.remember({})
    assert not run.failed


def test_the_place_that_was_lost_last_is_taken_first_and_then_the_others(on_flash):
    run = trained(on_flash)
    run.lose(2)
    run.lose(1)
    places = run.apart.places
    assert places.are_missing
    assert places.free([]) == [Place(0, 0)]  # what replica 1 has stored may be old
    assert places.free([Place(0, 0)]) == []
    places.take(Place(0, 0), 7)
    assert places.free([]) == [Place(0, 1)]
    assert not places.are_missing
    assert places.comes_back(1)


def test_two_of_one_host_hold_the_same_only_where_nobody_else_is_to_come(in_memory):
    places = in_memory.apart.places
    places.lose(2)
    here = [(Place(0, 0), "host-1")]
    in_memory.conductor.lost_nodes.clear()

    def place_for(host, others_come, asked=None):
        return in_memory.apart.place_for(None, asked, host, here, others_come)

    assert place_for("host-2", True) == Place(0, 1)
    assert place_for("host-1", True) is None  # an engine then, and another takes the place
    assert place_for("host-1", False) == Place(0, 1)
    assert place_for("host-1", True, asked=0) == Place(0, 1)
    assert place_for("host-1", True, asked=1) is None


@pytest.mark.parametrize("replicas", [0, 3, 1.5, "two"])
def test_one_or_two_replicas(replicas):
    with pytest.raises(ConfigError, match=r"store\.replicas"):
        Config.from_mapping(
            {
                "model": "gpt2",
                "cluster": {"start": "local", "shards": "apart"},
                "store": {"replicas": replicas},
            }
        )


@pytest.mark.parametrize("cluster", [{}, {"start": "local"}])
def test_a_replica_in_the_same_process_is_refused(cluster):
    told = r"store\.replicas: expected 1 with cluster\.shards: here, got 2; .* to apart"
    with pytest.raises(ConfigError, match=told):
        Config.from_mapping({"model": "gpt2", "cluster": cluster, "store": {"replicas": 2}})


def test_replicas_on_flash_keep_two_durable_steps():
    store = {"replicas": 2, "flash": {"path": "x", "keep_steps": 1}}
    cluster = {"start": "local", "shards": "apart"}
    with pytest.raises(ConfigError, match=r"2 or more with store\.replicas above 1, got 1"):
        Config.from_mapping({"model": "gpt2", "cluster": cluster, "store": store})
