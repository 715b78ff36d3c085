"""An engine and a shard alone, with a worker that works only when the test lets it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from any_message import messages
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptionError
from penstock.fabric.messages import Kind, Message, message_with, pack_arrays
from penstock.fabric.nodes import CONDUCTOR, EngineNode, ShardNode
from penstock.fabric.transfers import Operation, Piece, Transfers
from penstock.tree import TreeNode

# Two stages of six weights on two shards; operations: forward of 0, turn of 1, backward of 0.
PIECES = (Piece(0, 0, 0, 3, 4), Piece(1, 0, 3, 6, 4))
PLAN = Transfers(
    (
        Operation(0, 0, "forward", PIECES, ()),
        Operation(1, 1, "turn", PIECES, PIECES),
        Operation(2, 0, "backward", PIECES, PIECES),
    ),
    shards=2,
)
SHARDS, ENGINES = [1, 2], [100, 101, 102]


class Runtime:
    """Keeps what is sent; jobs wait until the test has them done."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.jobs: list[tuple] = []

    def send(self, to: int, message: Message) -> None:
        self.sent.append((to, message))

    def work(self, job, then, failed) -> None:
        self.jobs.append((job, then, failed))

    def do(self, count: int = 1000) -> None:
        while self.jobs and count:
            job, then, failed = self.jobs.pop(0)
            count -= 1
            try:
                result = job()
            except Exception as error:
                failed(error)
            else:
                then(result)

    def kinds(self) -> list[Kind]:
        return [message.kind for _, message in self.sent]

    def errors(self) -> list[str]:
        return [m.body["error"] for _, m in self.sent if m.kind is Kind.TROUBLE]


class Engine:
    """Writes down what it is asked to do."""

    def __init__(self) -> None:
        self.done: list = []
        self.fails: Exception | None = None

    def begin(self, step, part, rows) -> None:
        self.done.append(("begin", step))

    def place(self, operation, piece, payload) -> None:
        self.done.append(("place", operation.number, piece.begin))

    def compute(self, operation):
        self.done.append(("compute", operation.number))
        if self.fails is not None:
            raise self.fails
        if operation.sweep == "forward":
            return []
        return [TreeNode(0, 0, (torch.ones(6),))]

    def losses(self) -> list[float]:
        return [1.0]


class Shard(Engine):
    """The same of a shard."""

    def settle(self) -> None:
        self.done.append(("settle",))

    def begin(self, step) -> None:
        self.done.append(("begin", step))

    def held_steps(self) -> list[int]:
        return [0, 1]

    def go_back(self, step) -> None:
        self.done.append(("go back", step))

    def fetch(self, operation) -> list[np.ndarray]:
        self.done.append(("fetch", operation.number))
        return [np.zeros(3, np.float32)]

    def receive(self, operation, gradients) -> None:
        self.done.append(("receive", operation.number))
        self.received = gradients

    def prepare(self) -> dict:
        return {"sum": 1}

    def commit(self, step, decision) -> dict:
        self.done.append(("commit", step))
        return {"step": step}


def view(epoch: int = 1, engines=ENGINES, shards=SHARDS) -> Message:
    body = {"shards": [[node] for node in shards], "engines": list(engines)}
    return Message(Kind.VIEW, epoch, CONDUCTOR, body=body)


def begin(step: int = 1, epoch: int = 1, **changes) -> Message:
    described, payload = pack_arrays({"x": np.zeros(2, np.float32)})
    body = {"first": 0, "total": 3, "seed": 0, "scale": 1.0, "rows": described} | changes
    fields = {"epoch": epoch, "sender": CONDUCTOR, "step": step, "body": body}
    return message_with(payload, kind=Kind.BEGIN, **fields)


def weights(op: int, chunk: int, epoch: int = 1, step: int = 1, **changes) -> Message:
    sender = changes.pop("sender", 1 + chunk)
    payload = changes.pop("payload", np.zeros(3, np.float32))
    fields = {"epoch": epoch, "sender": sender, "step": step, "op": op, "chunk": chunk}
    return message_with(payload, kind=Kind.WEIGHTS, **fields | changes)


def gradient(op: int, chunk: int, level: int = 0, index: int = 0, **changes) -> Message:
    payload = changes.pop("payload", np.ones(3, np.float32))
    fields = {"epoch": 1, "sender": 101, "step": 1, "op": op, "chunk": chunk}
    fields |= {"level": level, "index": index}
    return message_with(payload, kind=Kind.GRADIENT, **fields | changes)


def engine(number: int = 100, engines=ENGINES) -> tuple[EngineNode, Runtime, Engine]:
    runtime, work = Runtime(), Engine()
    node = EngineNode(number, runtime, PLAN, work)
    node.handle(view(engines=engines))
    return node, runtime, work


def shard(place: int = 0) -> tuple[ShardNode, Runtime, Shard]:
    runtime, work = Runtime(), Shard()
    node = ShardNode(1 + place, place, runtime, PLAN, work)
    node.handle(view())
    return node, runtime, work


# The engine


def test_weights_pass_on_at_once_and_are_placed_when_no_earlier_job_can_use_their_memory():
    node, runtime, work = engine(engines=[100, 101])
    node.handle(begin())
    node.handle(weights(0, 0))
    node.handle(weights(0, 1, sender=101))
    runtime.do(1)  # the rows; the first operation has not been computed yet
    node.handle(view(2, engines=[100, 101]))
    node.handle(begin(epoch=2))
    runtime.sent.clear()
    node.handle(weights(0, 0, epoch=2))
    assert [to for to, _ in runtime.sent] == [101]
    assert node.is_busy
    runtime.do(1)
    assert work.done[-1] == ("compute", 0)  # of the epoch before: it counts for nothing
    assert Kind.LOSSES not in runtime.kinds()
    runtime.do()
    assert work.done[-2:] == [("begin", 1), ("place", 0, 0)]
    node.handle(weights(0, 1, epoch=2, sender=101))
    runtime.do()
    assert work.done[-1] == ("compute", 0)
    assert not node.is_busy


@pytest.mark.parametrize("make", [engine, shard])
def test_a_view_of_an_earlier_epoch_changes_nothing(make):
    node, runtime, _ = make()
    node.handle(view(3))
    node.handle(begin(epoch=3))
    runtime.sent.clear()
    node.handle(view(2))
    assert node.epoch == 3
    assert not runtime.sent
    node.handle(view(3))  # a repetition is answered
    assert runtime.kinds() == [Kind.SEEN]
    runtime.do()
    assert not runtime.errors()


def test_an_operation_is_computed_once_whatever_comes_again():
    node, runtime, work = engine(engines=[100])
    node.handle(begin())
    runtime.do()
    for op in (0, 1):
        for chunk in (0, 0, 1, 1, 0):
            node.handle(weights(op, chunk))
        runtime.do()
        node.handle(weights(op, 1))
        runtime.do()
    assert [entry for entry in work.done if entry[0] == "compute"] == [
        ("compute", 0),
        ("compute", 1),
    ]
    assert len([entry for entry in work.done if entry[0] == "place"]) == 4


def test_a_gradient_that_comes_before_the_rows_waits_for_them():
    # Three engines: the second adds what it and the first have; the third adds that to its own.
    node, runtime, _ = engine(101)
    node.handle(gradient(2, 0, 0, 0, sender=100))
    node.handle(begin(first=1))
    runtime.sent.clear()
    node.handle(gradient(2, 0, 0, 1, sender=101))
    (to, sent), *more = runtime.sent
    assert not more
    assert (to, sent.level, sent.index) == (102, 1, 0)
    np.testing.assert_array_equal(sent.payload.view(np.float32), [2.0] * 3)


def test_a_gradient_counts_once():
    node, runtime, _ = engine(101)
    node.handle(begin(first=1))
    runtime.sent.clear()
    for _ in range(2):
        node.handle(gradient(2, 0, 0, 0, sender=100))
    assert not runtime.sent
    for _ in range(2):
        node.handle(gradient(2, 0, 0, 1, sender=101))
    node.handle(gradient(2, 0, 0, 0, sender=100))
    assert runtime.kinds() == [Kind.GRADIENT]


def test_room_is_said_up_the_tree_only_when_all_below_have_it():
    node, runtime, _ = engine(100)  # of the tree of shard 0 the root; 101 and 102 are below
    node.handle(begin())
    runtime.do()
    runtime.sent.clear()
    release = {"kind": Kind.RELEASED, "epoch": 1, "step": 1, "op": 1, "chunk": 0}
    node.handle(Message(sender=101, **release))
    node.handle(Message(sender=102, **release))
    assert not runtime.sent
    node.handle(weights(0, 0))
    node.handle(weights(0, 1, sender=101))
    runtime.do()
    assert [(to, m.op, m.chunk) for to, m in runtime.sent if m.kind is Kind.RELEASED] == [
        (1, 1, 0),  # to shard 0; of shard 1 this engine is a leaf below 101
        (101, 1, 1),
    ]


def test_an_engine_says_what_its_work_ran_into():
    node, runtime, work = engine(engines=[100])
    work.fails = CorruptionError("a broken device")
    node.handle(begin())
    node.handle(weights(0, 0))
    node.handle(weights(0, 1))
    runtime.do()
    (trouble,) = [m for _, m in runtime.sent if m.kind is Kind.TROUBLE]
    assert trouble.step == 1
    assert trouble.body == {"error": "CorruptionError", "text": "a broken device"}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (weights(3, 0), "names operation 3 of 3"),
        (weights(0, 2), "names chunk 2 of 2"),
        (weights(0, 0, payload=np.zeros(4, np.float32)), "has 16 bytes for 12"),
        (weights(0, 0, payload=None), "has 0 bytes for 12"),
        (gradient(9, 0), "names operation 9 of 3"),
        (gradient(0, 0), "names gradient 0 of 0"),
        (gradient(2, 0, payload=np.zeros(2, np.float32)), "has 8 bytes for 12"),
        (gradient(2, 0, 0, 2), "sums micro-batches 2 to 3; this engine adds those of 0 to 2"),
        (gradient(2, 0, 2, 7), "sums micro-batches 28 to 3; this engine adds those of 0 to 2"),
        (gradient(2, 0, 60000, 7), "names level 60000 of a tree over 3"),
        (begin(2, total=0), "says '0' for 'total'"),
        (begin(2, total="all"), "says 'all' for 'total'"),
        (begin(2, seed=None), "says 'None' for 'seed'"),
        (Message(Kind.RELEASED, 1, 7, 1, 1, 5), "is not from below in the tree of shard 5"),
        (Message(Kind.RELEASED, 1, 102, 1, 1, 0), "is not from below in the tree of shard 0"),
        (Message(Kind.RELEASED, 1, 102, 1, 9, 1), "counts 9 operations"),
    ],
)
def test_what_makes_no_sense_to_an_engine_is_reported_and_changes_nothing(message, text):
    node, runtime, work = engine(101)
    node.handle(begin(first=1))
    runtime.do()
    runtime.sent.clear()
    before = list(work.done)
    node.handle(message)
    runtime.do()
    ((to, said),) = runtime.sent
    assert to == CONDUCTOR
    assert (said.kind, said.body["error"]) == (Kind.TROUBLE, "ProtocolError")
    assert text in said.body["text"]
    assert (said.epoch, said.step) == (message.epoch, message.step)
    assert work.done == before


# The shard


def whole_step(node: ShardNode, runtime: Runtime, step: int = 1) -> None:
    node.handle(begin(step))
    runtime.do()
    for op in (2, 1):  # the sums of the later operation come first
        node.handle(gradient(op, 0, 2, step=step))
    runtime.do()


def test_a_shard_stays_so_far_ahead_as_there_is_room():
    node, runtime, work = shard()
    node.handle(begin())
    runtime.do()
    assert work.done == [("begin", 1), ("fetch", 0), ("fetch", 1)]
    node.handle(Message(Kind.RELEASED, 1, 100, 1, 1, 0))
    runtime.do()
    assert work.done[-1] == ("fetch", 2)
    assert [(to, m.op) for to, m in runtime.sent if m.kind is Kind.WEIGHTS] == [
        (100, 0),
        (100, 1),
        (100, 2),
    ]


def test_gradients_are_handed_on_once_and_in_the_order_of_the_sweep():
    node, runtime, work = shard()
    node.handle(begin())
    runtime.do()
    node.handle(gradient(2, 0, 2))
    runtime.do()
    assert ("receive", 2) not in work.done
    for _ in range(2):
        node.handle(gradient(1, 0, 2))
        node.handle(gradient(2, 0, 2))
        runtime.do()
    assert work.done[-2:] == [("receive", 1), ("receive", 2)]
    assert runtime.kinds().count(Kind.PREPARED) == 1


def test_the_first_of_two_gradients_counts():
    node, runtime, work = shard()
    node.handle(begin())
    runtime.do()
    node.handle(gradient(2, 0, 2))
    node.handle(gradient(2, 0, 2, payload=np.full(3, 2, np.float32)))
    node.handle(gradient(1, 0, 2))
    runtime.do()
    np.testing.assert_array_equal(work.received[0], [1.0] * 3)


def test_a_shard_without_gradients_is_prepared_as_soon_as_it_has_begun():
    runtime, work = Runtime(), Shard()
    forward = Operation(0, 0, "forward", PIECES, ())
    node = ShardNode(1, 0, runtime, Transfers((forward,), 2), work)
    node.handle(view())
    node.handle(begin())
    assert Kind.PREPARED not in runtime.kinds()
    runtime.do()
    assert Kind.PREPARED in runtime.kinds()


def test_a_commit_is_made_once_and_answered_as_often_as_it_is_asked():
    node, runtime, work = shard()
    whole_step(node, runtime)
    commit = Message(Kind.COMMIT, 1, CONDUCTOR, 1)
    node.handle(commit)
    node.handle(commit)
    runtime.do()
    node.handle(commit)
    runtime.do()
    assert work.done.count(("commit", 1)) == 1
    assert [m.body for _, m in runtime.sent if m.kind is Kind.COMMITTED] == [{"step": 1}] * 2


def test_a_commit_of_another_epoch_step_or_trial_is_not_made():
    node, runtime, work = shard()
    node.handle(begin())
    runtime.do()
    node.handle(Message(Kind.COMMIT, 1, CONDUCTOR, 1))
    assert runtime.errors() == ["ProtocolError"]  # not prepared
    whole_step(node, runtime)
    node.handle(Message(Kind.COMMIT, 2, CONDUCTOR, 1))
    node.handle(Message(Kind.COMMIT, 1, CONDUCTOR, 2))
    node.handle(view(2))
    node.handle(Message(Kind.COMMIT, 1, CONDUCTOR, 1))
    node.handle(Message(Kind.COMMIT, 2, CONDUCTOR, 1))
    runtime.do()
    assert ("commit", 1) not in work.done


def test_a_step_that_was_committed_and_undone_is_committed_again():
    node, runtime, work = shard()
    whole_step(node, runtime)
    node.handle(Message(Kind.COMMIT, 1, CONDUCTOR, 1))
    node.handle(view(2))  # while it commits; its answer is of no step any more
    node.handle(Message(Kind.GO_BACK, 2, CONDUCTOR, body={"to": 0}))
    runtime.do()
    assert work.done[-2:] == [("commit", 1), ("go back", 0)]
    assert Kind.COMMITTED not in runtime.kinds()
    node.handle(begin(epoch=2))
    runtime.do()
    for op in (1, 2):
        node.handle(gradient(op, 0, 2, epoch=2))
    node.handle(Message(Kind.COMMIT, 2, CONDUCTOR, 1))
    runtime.do()
    assert work.done.count(("commit", 1)) == 2


def test_going_back_happens_once_and_never_within_a_step():
    node, runtime, work = shard()
    back = Message(Kind.GO_BACK, 1, CONDUCTOR, body={"to": 1})
    node.handle(Message(Kind.HOLDS, 1, CONDUCTOR))
    node.handle(back)
    node.handle(back)
    runtime.do()
    node.handle(begin(2))
    node.handle(back)
    runtime.do()
    assert work.done.count(("go back", 1)) == 1
    assert runtime.sent[1][1].body == {"steps": [0, 1]}


def test_what_is_asked_late_does_not_undo_a_step():
    node, runtime, work = shard()
    node.handle(begin())
    node.handle(Message(Kind.GO_BACK, 1, CONDUCTOR, body={"to": 0}))
    runtime.do()
    assert ("go back", 0) not in work.done


def test_a_step_begins_once():
    node, runtime, work = shard()
    node.handle(begin())
    node.handle(begin())
    runtime.do()
    node.handle(begin())
    runtime.do()
    assert work.done.count(("begin", 1)) == 1


def test_a_shard_whose_place_another_node_has_taken_takes_no_part():
    node, runtime, _ = shard()
    node.handle(view(2, shards=[7, 2]))
    node.handle(begin(epoch=2))
    assert not runtime.jobs


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (gradient(3, 0, 2), "names operation 3 of 3"),
        (gradient(2, 2, 2), "names gradient 2 of 2"),
        (gradient(2, 1, 2), "is for shard 1, and came to 0"),
        (gradient(2, 0, 0, 1), "is no sum over all micro-batches"),
        (gradient(2, 0, 2, payload=np.zeros(5, np.uint8)), "has 5 bytes for 12"),
        (Message(Kind.RELEASED, 1, 100, 1, 4, 0), "counts 4 operations"),
    ],
)
def test_what_makes_no_sense_to_a_shard_is_reported_and_changes_nothing(message, text):
    node, runtime, work = shard()
    node.handle(begin())
    runtime.do()
    runtime.sent.clear()
    before = list(work.done)
    node.handle(message)
    runtime.do()
    ((_, said),) = runtime.sent
    assert (said.kind, said.body["error"]) == (Kind.TROUBLE, "ProtocolError")
    assert text in said.body["text"]
    assert work.done == before


# Both


@settings(max_examples=60, deadline=None)
@given(
    st.lists(messages([0, 1, 2, 100, 101, 102, 7]), max_size=8), st.sampled_from([engine, shard])
)
def test_no_message_can_make_a_node_raise(received, make):
    node, runtime, _ = make()
    node.handle(begin())
    for message in received:
        node.handle(message)
        runtime.do(3)
    for _, message in runtime.sent:
        assert isinstance(message, Message)
