"""What a shard answers to the run's process is checked: one that lies loses its place.

The nodes are real stores that answer calls in this process; one of them changes what it says.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from any_message import anything
from fake_workers import FakeWorker
from hypothesis import given, settings, strategies as st
from store_programs import (
    CONSTANT,
    LAYERS,
    flash_store,
    forward_sweep,
    make_program,
    random_gradients,
    random_weights,
    send,
    train,
    training_store,
)
from waiting import wait_until

from penstock.distributed.protocol.messages import MessageType
from penstock.distributed.rpc import store_server
from penstock.distributed.rpc.rpc import (
    FrameAssembler,
    InvalidResponseError,
    RpcMessage,
    ShardLostError,
    frames,
)
from penstock.distributed.rpc.store_client import StoreClient
from penstock.errors import PenstockError
from penstock.store import AdamW, CommitRule, Store
from penstock.store.flash import FlashStore

PROGRAM = make_program(
    LAYERS, frozen=("position",), stream_dtype=torch.bfloat16, narrow=("position",)
)
NAME = "block.0.weight"
Lie = Callable[[RpcMessage], RpcMessage]


class Kept:
    """Where a node's store is: it is open already."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def open(self, must_hold: bool = False) -> Store:
        return self.store

    def close(self) -> None:
        """It is of use to other tests."""


class Nodes:
    """Two nodes that hold the same; the first may lie when it is asked for a method."""

    def __init__(self, stores: Mapping[int, Store]) -> None:
        self.stores, self.here = stores, list(stores)
        self.lies: dict[str, Lie] = {}
        self.refused: list[tuple[int, str]] = []
        self.shard = StoreClient(
            PROGRAM,
            self,
            nodes=lambda: tuple(self.here),
            await_node=self.require_one,
            refuse=self.refuse,
            copy=lambda source, target: None,
            rule=CommitRule(CONSTANT),
            replicas=len(stores),
        )

    def begin(self, node, method, arguments, arrays, most=0):
        said = RpcMessage({"method": method, "with": arguments}, arrays)
        done = store_server.respond(Kept(self.stores[node]), said)
        assert "error" not in done.body, done.body
        if node == 1 and method in self.lies:
            done = self.lies[method](done)
        return SimpleNamespace(node=node, answer=lambda: done)

    def refuse(self, node: int, error: InvalidResponseError) -> None:
        self.refused.append((node, str(error)))
        self.here.remove(node)

    def require_one(self) -> None:
        if not self.here:
            raise ShardLostError("nobody is left")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Iterator[dict[int, FlashStore]]:
    optimizer, folder = AdamW(0.9, 0.95, 1e-8, moments="8bit"), tmp_path_factory.mktemp("nodes")
    stores = {n: flash_store(PROGRAM, folder / f"{n}", optimizer=optimizer) for n in (1, 2)}
    for store in stores.values():
        store.load(random_weights(PROGRAM, 0).items())
        train(store, 2, seed=3)
    yield stores
    for store in stores.values():
        store.close()


@pytest.fixture
def nodes(trained) -> Nodes:
    return Nodes(trained)


@pytest.fixture
def in_memory() -> Nodes:
    made = Nodes({node: training_store(PROGRAM, "bf16") for node in (1, 2)})
    made.shard.load(random_weights(PROGRAM, 0).items())
    return made


def says(**changes: Any) -> Lie:
    """Say something else, or nothing, for some keys."""

    def lie(said: RpcMessage) -> RpcMessage:
        return RpcMessage(
            {k: v for k, v in ({**said.body, **changes}).items() if v is not ...}, said.arrays
        )

    return lie


def gives(change: Callable[[np.ndarray], np.ndarray | None]) -> Lie:
    """Give other arrays, or none."""

    def lie(said: RpcMessage) -> RpcMessage:
        changed = {key: change(array) for key, array in said.arrays.items()}
        return RpcMessage(
            said.body, {key: array for key, array in changed.items() if array is not None}
        )

    return lie


def other_role(role: str, stored: object) -> Lie:
    def lie(said: RpcMessage) -> RpcMessage:
        return RpcMessage({**said.body, "roles": {**said.body["roles"], role: stored}})

    return lie


ELEMENTS = PROGRAM.weights[NAME].elements
LIES: list[tuple[str, Lie, Callable[[StoreClient], Any], str]] = [
    ("open", says(memory_bytes=[1]), lambda s: s.open() and s.memory_bytes, "as 'memory_bytes'"),
    ("open", says(memory_bytes={"x": "1"}), lambda s: s.open() and 0, "as 'memory_bytes'"),
    ("open", says(flash_bytes=-1), lambda s: s.open() and s.flash_bytes, "'-1' as 'flash_bytes'"),
    ("open", says(flash_rule=[1]), lambda s: s.open() and s.flash_rule, "as 'flash_rule'"),
    ("open", says(is_new=...), lambda s: s.open() and 0, "has 'None' as 'is_new'"),
    ("flush", says(step="2"), lambda s: s.flush(), "has '2' as 'step'"),
    ("flush", says(step=True), lambda s: s.flush(), "has 'True' as 'step'"),
    ("discard", says(step=...), lambda s: s.discard(), "has 'None' as 'step'"),
    ("status", says(is_new=0), lambda s: s.is_new, "has '0' as 'is_new'"),
    ("status", says(durable_step=1.5), lambda s: s.durable_step is None, "as 'durable_step'"),
    ("status", says(extra=[1]), lambda s: s.extra, "as 'extra'"),
    ("fetch", gives(lambda a: None), lambda s: s.fetch(0), "has no array '0'"),
    ("fetch", gives(lambda a: a[:-1]), lambda s: s.fetch(0), "values of uint16 as '0', expected"),
    ("stream", gives(lambda a: a.view(np.int16)), lambda s: s.stream([NAME]), "of int16 as '0'"),
    ("unchanged", says(unchanged=[1]), lambda s: s.unchanged(), "as 'unchanged'"),
    ("unchanged", says(unchanged=["x"]), lambda s: s.unchanged(), "names a weight 'x' that"),
    ("take_traffic", says(bytes=[1, -1]), lambda s: None if s.take_traffic() else 0, "as 'bytes'"),
    (
        "take_traffic",
        says(seconds=[math.nan, 0.0]),
        lambda s: None if s.take_traffic() else 0,
        "as 'seconds'",
    ),
    (
        "take_flash_traffic",
        says(moved=7),
        lambda s: None if s.take_flash_traffic() else 0,
        "has '7' as 'moved'",
    ),
    ("roles", says(roles={}), lambda s: s.roles(NAME), "has invalid roles of"),
    (
        "roles",
        other_role("master", ["float32", [ELEMENTS - 1]]),
        lambda s: s.roles(NAME),
        "has invalid roles of",
    ),
    ("roles", other_role("x", ["float64", [1]]), lambda s: s.roles(NAME), "as 'roles'"),
    ("roles", other_role("x", ["uint8", [2**60]]), lambda s: s.roles(NAME), "has invalid roles of"),
    ("read", gives(lambda a: a[1:]), lambda s: s.master(NAME), "as 'values', expected"),
    (
        "read",
        gives(lambda a: a.astype(np.float64)),
        lambda s: s.state(NAME),
        "of float64 as 'values', expected",
    ),
    ("content_hash", says(hash=7), lambda s: s.content_hash(), "has '7' as 'hash'"),
    ("content_hash", says(hash="7"), lambda s: s.content_hash(), "has '7' as 'hash'"),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and one and isinstance(next(iter(one.values())), torch.Tensor):
        return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(
    ("method", "lie", "ask", "text"), LIES, ids=[f"{m}-{i}" for i, (m, *_) in enumerate(LIES)]
)
def test_invalid_response_evicts_node_and_asks_replica(nodes, method, lie, ask, text):
    expected = ask(Nodes(nodes.stores).shard)
    nodes.lies[method] = lie
    assert same(ask(nodes.shard), expected)
    ((node, why),) = nodes.refused
    assert node == 1
    assert f"{method!r}" in why
    assert text in why
    assert "do all nodes run the same version of Penstock" in why


REPORTS = [
    ("prepare", says(squares=["one"]), "expected a report on gradients"),
    ("prepare", says(silent=[99]), "names stages [99] of"),
    ("prepare", says(missing=["x"]), "names a weight 'x' that the shard does not hold"),
    ("prepare", says(non_finite={"0": ["x"]}), "names a weight 'x' that the shard does not hold"),
    ("prepare", says(zero={"x": 1}), "names a weight 'x' that the shard does not hold"),
    ("prepare", says(zero={NAME: "all"}), "expected a report on gradients"),
    ("decide", says(step=...), "has 'None' as 'step'"),
    ("decide", says(step=9), "names step 9, expected step 1"),
]


@pytest.mark.parametrize(("method", "lie", "text"), REPORTS)
def test_step_is_committed_by_replica_with_valid_responses(in_memory, method, lie, text):
    shard = in_memory.shard
    forward_sweep(shard)
    send(shard, random_gradients(PROGRAM, np.random.default_rng(5)))
    in_memory.lies[method] = lie
    assert shard.commit().decision.step == shard.step == 1
    ((node, why),) = in_memory.refused
    assert node == 1
    assert text in why
    assert in_memory.stores[2].step == 1


def test_store_at_wrong_step_after_restore_is_refused(in_memory):
    shard = in_memory.shard
    in_memory.lies["finish_restore"] = says(step=4)
    shard.begin_restore()
    for name, weight in random_weights(PROGRAM, 1).items():
        shard.write(name, "master", 0, weight.numpy().reshape(-1))
        shard.clear_state(name)
    shard.finish_restore(5)
    ((node, why),) = in_memory.refused
    assert node == 1
    assert "names step 4, expected step 5" in why
    assert shard.step == 5


def test_invalid_response_without_replica_ends_run(nodes):
    nodes.here.remove(2)
    nodes.lies["content_hash"] = says(hash=None)
    with pytest.raises(
        ShardLostError, match=r"node 1 sent a response to 'content_hash' that has 'N"
    ):
        nodes.shard.content_hash()
    assert nodes.refused


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted({method for method, *_ in LIES})), anything, st.data())
def test_random_responses_raise_only_own_errors(trained, method, lie, data):
    nodes = Nodes({1: trained[1]})

    def say(said: RpcMessage) -> RpcMessage:
        return RpcMessage(
            {**said.body, data.draw(st.sampled_from(sorted(said.body))): lie}, said.arrays
        )

    nodes.lies[method] = say
    try:
        next(ask for each, _, ask, _ in LIES if each == method)(nodes.shard)
    except PenstockError:
        assert nodes.refused


def test_shard_with_invalid_response_is_disconnected(open_manager):
    opened = open_manager(start="listen", shards="apart", lease=60.0)
    joined = [open_manager.join(opened, shard=shard) for shard in (0, 1)]
    for member, assignment in joined:
        member.report_ready(opened.manager, assignment)
    shards = opened.manager.remote_shards()

    def lie(member: FakeWorker, node: int) -> None:
        gathered, whole = FrameAssembler(lambda number: 0), None
        while whole is None:
            whole = gathered.take(member.hear())
        for frame in frames(
            MessageType.RPC_REPLY, node, whole[0], RpcMessage({"step": 0, "hash": 7})
        ):
            member.connection.send(frame)

    liar = threading.Thread(target=lie, args=(joined[1][0], joined[1][1].body["node"]))
    liar.start()
    with pytest.raises(ShardLostError, match=r"was lost: node 2 sent a response to 'content_hash"):
        shards[1].content_hash()
    liar.join()
    wait_until(lambda: [member.number for member in opened.manager.registry.members] == [1])
    with pytest.raises(PenstockError, match="shard 1 of the store was lost, and the state in"):
        opened.manager.event_queue.poll()
    assert "shard lost" in opened.event_kinds
