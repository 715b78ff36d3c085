"""An engine alone: weights that pass on, operations, gradients' sums."""

from __future__ import annotations

import numpy as np
import pytest
from lone_nodes import (
    begin,
    engine,
    gradient,
    view,
    weights,
)

from penstock.distributed.protocol import COORDINATOR
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.errors import CorruptionError


def test_weights_are_forwarded_at_once_and_placed_after_earlier_jobs():
    node, context, work = engine(engines=[100, 101])
    node.handle(begin())
    node.handle(weights(0, 0))
    node.handle(weights(0, 1, sender=101))
    context.do(1)  # the rows; the first operation has not been computed yet
    node.handle(view(2, engines=[100, 101]))
    node.handle(begin(epoch=2))
    context.sent.clear()
    node.handle(weights(0, 0, epoch=2))
    assert [to for to, _ in context.sent] == [101]
    assert node.is_busy
    context.do(1)
    assert work.done[-1] == ("compute", 0)  # of the epoch before: it counts for nothing
    assert MessageType.LOSSES not in context.kinds()
    context.do()
    assert work.done[-2:] == [("begin", 1), ("place", 0, 0)]
    node.handle(weights(0, 1, epoch=2, sender=101))
    context.do()
    assert work.done[-1] == ("compute", 0)
    assert not node.is_busy


def test_operation_is_computed_once_despite_repeats():
    node, context, work = engine(engines=[100])
    node.handle(begin())
    context.do()
    for op in (0, 1):
        for chunk in (0, 0, 1, 1, 0):
            node.handle(weights(op, chunk))
        context.do()
        node.handle(weights(op, 1))
        context.do()
    assert [entry for entry in work.done if entry[0] == "compute"] == [
        ("compute", 0),
        ("compute", 1),
    ]
    assert len([entry for entry in work.done if entry[0] == "place"]) == 4


def test_gradient_before_begin_is_kept():
    # Three engines: the second adds what it and the first have; the third adds that to its own.
    node, context, _ = engine(101)
    node.handle(gradient(2, 0, 0, 0, sender=100))
    node.handle(begin(first=1))
    context.sent.clear()
    node.handle(gradient(2, 0, 0, 1, sender=101))
    (to, sent), *more = context.sent
    assert not more
    assert (to, sent.level, sent.index) == (102, 1, 0)
    np.testing.assert_array_equal(sent.payload.view(np.float32), [2.0] * 3)


def test_repeated_gradient_is_added_once():
    node, context, _ = engine(101)
    node.handle(begin(first=1))
    context.sent.clear()
    for _ in range(2):
        node.handle(gradient(2, 0, 0, 0, sender=100))
    assert not context.sent
    for _ in range(2):
        node.handle(gradient(2, 0, 0, 1, sender=101))
    node.handle(gradient(2, 0, 0, 0, sender=100))
    assert context.kinds() == [MessageType.GRADIENT]


def test_credit_is_sent_when_whole_subtree_has_it():
    node, context, _ = engine(100)  # of the tree of shard 0 the root; 101 and 102 are below
    node.handle(begin())
    context.do()
    context.sent.clear()
    release = {"kind": MessageType.WEIGHT_CREDIT, "epoch": 1, "step": 1, "op": 1, "chunk": 0}
    node.handle(Message(sender=101, **release))
    node.handle(Message(sender=102, **release))
    assert not context.sent
    node.handle(weights(0, 0))
    node.handle(weights(0, 1, sender=101))
    context.do()
    assert [
        (to, m.op, m.chunk) for to, m in context.sent if m.kind is MessageType.WEIGHT_CREDIT
    ] == [
        (1, 1, 0),  # to shard 0; of shard 1 this engine is a leaf below 101
        (101, 1, 1),
    ]


def test_engine_reports_error_of_its_work():
    node, context, work = engine(engines=[100])
    work.fails = CorruptionError("a broken device")
    node.handle(begin())
    node.handle(weights(0, 0))
    node.handle(weights(0, 1))
    context.do()
    (trouble,) = [m for _, m in context.sent if m.kind is MessageType.FAILURE]
    assert trouble.step == 1
    assert trouble.body == {"error": "CorruptionError", "text": "a broken device"}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (weights(3, 0), "names operation 3 of 3"),
        (weights(0, 2), "names chunk 2 of 2"),
        (weights(0, 0, payload=np.zeros(4, np.float32)), "has 16 bytes, expected 12"),
        (weights(0, 0, payload=None), "has 0 bytes, expected 12"),
        (gradient(9, 0), "names operation 9 of 3"),
        (gradient(0, 0), "names gradient 0 of 0"),
        (gradient(2, 0, payload=np.zeros(2, np.float32)), "has 8 bytes, expected 12"),
        (gradient(2, 0, 0, 2), "sums micro-batches 2 to 3; this node adds those of 0 to 2"),
        (gradient(2, 0, 2, 7), "sums micro-batches 28 to 3; this node adds those of 0 to 2"),
        (gradient(2, 0, 60000, 7), "names level 60000 of a tree over 3"),
        (begin(2, total=0), "has '0' as 'total'"),
        (begin(2, total="all"), "has 'all' as 'total'"),
        (begin(2, seed=None), "has 'None' as 'seed'"),
        (
            Message(MessageType.WEIGHT_CREDIT, 1, 7, 1, 1, 5),
            "is not from a child of this node in the tree of shard 5",
        ),
        (
            Message(MessageType.WEIGHT_CREDIT, 1, 102, 1, 1, 0),
            "is not from a child of this node in the tree of shard 0",
        ),
        (Message(MessageType.WEIGHT_CREDIT, 1, 102, 1, 9, 1), "counts 9 operations"),
    ],
)
def test_invalid_message_to_engine_is_reported_without_effect(message, text):
    node, context, work = engine(101)
    node.handle(begin(first=1))
    context.do()
    context.sent.clear()
    before = list(work.done)
    node.handle(message)
    context.do()
    ((to, said),) = context.sent
    assert to == COORDINATOR
    assert (said.kind, said.body["error"]) == (MessageType.FAILURE, "ProtocolError")
    assert text in said.body["text"]
    assert (said.epoch, said.step) == (message.epoch, message.step)
    assert work.done == before
