"""A shard alone: how far ahead it streams, what it takes, when it commits."""

from __future__ import annotations

import numpy as np
import pytest
from lone_nodes import (
    PIECES,
    Runtime,
    Shard,
    begin,
    gradient,
    shard,
    view,
)

from penstock.distributed.protocol import COORDINATOR, ShardNode
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.protocol.transfer_schedule import TransferOperation, TransferSchedule
from penstock.step_schedule import ByStep


def whole_step(node: ShardNode, context: Runtime, step: int = 1) -> None:
    node.handle(begin(step))
    context.do()
    for op in (2, 1):  # the sums of the later operation come first
        node.handle(gradient(op, 0, 2, step=step))
    context.do()


def test_shard_streams_within_window():
    node, context, work = shard()
    node.handle(begin())
    context.do()
    assert work.done == [("enter",), ("begin", 1), ("fetch", 0), ("fetch", 1)]
    node.handle(Message(MessageType.WEIGHT_CREDIT, 1, 100, 1, 1, 0))
    context.do()
    assert work.done[-1] == ("fetch", 2)
    assert [(to, m.op) for to, m in context.sent if m.kind is MessageType.WEIGHTS] == [
        (100, 0),
        (100, 1),
        (100, 2),
    ]


def test_gradients_are_stored_once_in_sweep_order():
    node, context, work = shard()
    node.handle(begin())
    context.do()
    node.handle(gradient(2, 0, 2))
    context.do()
    assert ("receive", 2) not in work.done
    for _ in range(2):
        node.handle(gradient(1, 0, 2))
        node.handle(gradient(2, 0, 2))
        context.do()
    assert work.done[-2:] == [("receive", 1), ("receive", 2)]
    assert context.kinds().count(MessageType.PREPARED) == 1


def test_messages_of_engines_before_begin_are_kept():
    """BEGIN is on another connection: a replica that does not stream may get gradients first."""
    node, context, work = shard()
    whole_step(node, context)
    node.handle(Message(MessageType.WEIGHT_CREDIT, 1, 100, 2, 1, 0))
    for op in (1, 2):
        node.handle(gradient(op, 0, 2, step=2))
    assert node.refused == 0
    context.sent.clear()
    node.handle(begin(2))
    context.do()
    done = work.done[work.done.index(("begin", 2)) :]
    assert done[1:] == [("receive", 1), ("receive", 2), ("fetch", 0), ("fetch", 1), ("fetch", 2)]
    assert context.kinds().count(MessageType.PREPARED) == 1


def test_messages_before_begin_count_in_their_step_and_epoch_only():
    node, context, work = shard()
    node.handle(gradient(1, 0, 2, step=2))
    node.handle(begin(3))
    node.handle(view(2))
    node.handle(gradient(1, 0, 2, step=4))
    node.handle(begin(4, epoch=2))
    node.handle(gradient(2, 0, 2, step=4, epoch=2))
    context.do()
    assert not [done for done in work.done if done[0] == "receive"]


def test_invalid_message_before_begin_is_reported_with_its_sender():
    node, context, _ = shard()
    node.handle(gradient(1, 1, 2))
    node.handle(begin())
    [failure] = [m for _, m in context.sent if m.kind is MessageType.FAILURE]
    assert failure.body["about"] == 101


def test_first_of_repeated_gradients_counts():
    node, context, work = shard()
    node.handle(begin())
    context.do()
    node.handle(gradient(2, 0, 2))
    node.handle(gradient(2, 0, 2, payload=np.full(3, 2, np.float32)))
    node.handle(gradient(1, 0, 2))
    context.do()
    np.testing.assert_array_equal(work.received[0], [1.0] * 3)


def test_shard_without_gradients_is_prepared_at_begin():
    context, work = Runtime(), Shard()
    forward = TransferOperation(0, 0, "forward", PIECES, ())
    node = ShardNode(1, 0, context, ByStep.always(TransferSchedule((forward,), 2)), work)
    node.handle(view())
    node.handle(begin())
    assert MessageType.PREPARED not in context.kinds()
    context.do()
    assert MessageType.PREPARED in context.kinds()


def test_repeated_commit_is_executed_once_and_acknowledged_again():
    node, context, work = shard()
    whole_step(node, context)
    commit = Message(MessageType.COMMIT, 1, COORDINATOR, 1)
    node.handle(commit)
    node.handle(commit)
    context.do()
    node.handle(commit)
    context.do()
    assert work.done.count(("commit", 1)) == 1
    assert [m.body for _, m in context.sent if m.kind is MessageType.COMMITTED] == [{"step": 1}] * 2


def test_commit_of_other_epoch_step_or_attempt_is_ignored():
    node, context, work = shard()
    node.handle(begin())
    context.do()
    node.handle(Message(MessageType.COMMIT, 1, COORDINATOR, 1))
    assert context.errors() == ["ProtocolError"]  # not prepared
    whole_step(node, context)
    node.handle(Message(MessageType.COMMIT, 2, COORDINATOR, 1))
    node.handle(Message(MessageType.COMMIT, 1, COORDINATOR, 2))
    node.handle(view(2))
    node.handle(Message(MessageType.COMMIT, 1, COORDINATOR, 1))
    node.handle(Message(MessageType.COMMIT, 2, COORDINATOR, 1))
    context.do()
    assert ("commit", 1) not in work.done


def test_rolled_back_step_is_committed_again():
    node, context, work = shard()
    whole_step(node, context)
    node.handle(Message(MessageType.COMMIT, 1, COORDINATOR, 1))
    node.handle(view(2))  # while it commits; its answer is of no step any more
    node.handle(Message(MessageType.ROLLBACK, 2, COORDINATOR, body={"to": 0}))
    context.do()
    assert work.done[-2:] == [("commit", 1), ("go back", 0)]
    assert MessageType.COMMITTED not in context.kinds()
    node.handle(begin(epoch=2))
    context.do()
    for op in (1, 2):
        node.handle(gradient(op, 0, 2, epoch=2))
    node.handle(Message(MessageType.COMMIT, 2, COORDINATOR, 1))
    context.do()
    assert work.done.count(("commit", 1)) == 2


def test_rollback_happens_once_and_never_within_step():
    node, context, work = shard()
    back = Message(MessageType.ROLLBACK, 1, COORDINATOR, body={"to": 1})
    node.handle(Message(MessageType.HELD_STEPS, 1, COORDINATOR))
    node.handle(back)
    node.handle(back)
    context.do()
    node.handle(begin(2))
    node.handle(back)
    context.do()
    assert work.done.count(("go back", 1)) == 1
    assert context.sent[1][1].body == {"steps": [0, 1]}


def test_late_rollback_does_not_undo_step():
    node, context, work = shard()
    node.handle(begin())
    node.handle(Message(MessageType.ROLLBACK, 1, COORDINATOR, body={"to": 0}))
    context.do()
    assert ("go back", 0) not in work.done


def test_repeated_begin_is_ignored():
    node, context, work = shard()
    node.handle(begin())
    node.handle(begin())
    context.do()
    node.handle(begin())
    context.do()
    assert work.done.count(("begin", 1)) == 1


def test_replaced_shard_takes_no_part():
    node, context, _ = shard()
    node.handle(view(2, shards=[7, 2]))
    node.handle(begin(epoch=2))
    assert not context.jobs


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (gradient(3, 0, 2), "names operation 3 of 3"),
        (gradient(2, 2, 2), "names gradient 2 of 2"),
        (gradient(2, 1, 2), "is for shard 1, but was sent to shard 0"),
        (gradient(2, 0, 0, 1), "is not the sum over all micro-batches"),
        (gradient(2, 0, 2, payload=np.zeros(5, np.uint8)), "has 5 bytes, expected 12"),
        (Message(MessageType.WEIGHT_CREDIT, 1, 100, 1, 4, 0), "counts 4 operations"),
    ],
)
def test_invalid_message_to_shard_is_reported_without_effect(message, text):
    node, context, work = shard()
    node.handle(begin())
    context.do()
    context.sent.clear()
    before = list(work.done)
    node.handle(message)
    context.do()
    ((_, said),) = context.sent
    assert (said.kind, said.body["error"]) == (MessageType.FAILURE, "ProtocolError")
    assert text in said.body["text"]
    assert work.done == before
