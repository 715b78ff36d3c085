"""A relay alone: what it forwards, adds, passes on and refuses."""

from __future__ import annotations

import numpy as np
import pytest
from lone_nodes import PLAN, Runtime, gradient, weights

from penstock.distributed.protocol import COORDINATOR, RelayNode
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.step_schedule import ByStep

RELAYS = [1000, 1001]


def relay(number: int = 1000, engines=(100, 101)) -> tuple[RelayNode, Runtime]:
    context = Runtime()
    node = RelayNode(number, context, ByStep.always(PLAN))
    body = {"shards": [[1, 3], [2]], "engines": list(engines), "relays": RELAYS}
    node.handle(Message(MessageType.VIEW, 1, COORDINATOR, body=body))
    node.handle(Message(MessageType.BEGIN, 1, COORDINATOR, 1, body={"total": 4}))
    context.sent.clear()
    return node, context


def test_relay_forwards_each_chunk_once_to_every_engine():
    node, context = relay()
    for _ in range(2):
        node.handle(weights(0, 0))
    assert [(to, m.kind, m.chunk) for to, m in context.sent] == [
        (100, MessageType.WEIGHTS, 0),
        (101, MessageType.WEIGHTS, 0),
    ]
    assert not node.is_busy
    assert node.progress == 1


def test_relay_adds_gradients_and_sends_one_sum_to_all_replicas():
    node, context = relay()
    # Two micro-batches each: the sums of the engines are nodes of level 1.
    node.handle(gradient(1, 0, 1, 0, payload=np.full(3, 2, np.float32), sender=100))
    assert not context.sent
    node.handle(gradient(1, 0, 1, 1, payload=np.full(3, 5, np.float32), sender=101))
    assert [(to, m.level, m.index) for to, m in context.sent] == [(1, 2, 0), (3, 2, 0)]
    np.testing.assert_array_equal(context.sent[0][1].payload.view(np.float32), [7, 7, 7])


def test_gradient_before_begin_is_kept():
    context = Runtime()
    node = RelayNode(1000, context, ByStep.always(PLAN))
    body = {"shards": [[1], [2]], "engines": [100], "relays": RELAYS}
    node.handle(Message(MessageType.VIEW, 1, COORDINATOR, body=body))
    context.sent.clear()
    node.handle(gradient(1, 0, 1, 0, sender=100))
    assert not context.sent
    node.handle(Message(MessageType.BEGIN, 1, COORDINATOR, 1, body={"total": 2}))
    assert [to for to, _ in context.sent] == [1]


def test_relay_passes_on_the_credit_of_the_slowest_engine():
    node, context = relay()
    credit = Message(MessageType.WEIGHT_CREDIT, 1, 100, 1, op=2, chunk=0)
    node.handle(credit)
    assert not context.sent
    node.handle(Message(MessageType.WEIGHT_CREDIT, 1, 101, 1, op=1, chunk=0))
    assert [(to, m.op, m.chunk) for to, m in context.sent] == [(1, 1, 0)]  # to who streams


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (weights(0, 1), "is for another tree of relays"),
        (weights(0, 7), "names chunk 7 of 2"),
        (weights(0, 0, payload=np.zeros(2, np.float32)), "has 8 bytes, expected 12"),
        (gradient(1, 0, 9, 0, sender=100), "names level 9 of a tree over 4 micro-batches"),
        (Message(MessageType.WEIGHT_CREDIT, 1, 102, 1, op=1, chunk=0), "is not from a child"),
    ],
)
def test_invalid_message_is_reported_without_effect(message, text):
    node, context = relay()
    node.handle(message)
    ((to, said),) = context.sent
    assert (to, said.kind) == (COORDINATOR, MessageType.FAILURE)
    assert text in said.body["text"]


def test_messages_of_another_epoch_are_refused():
    node, context = relay()
    node.handle(weights(0, 0, epoch=2))
    assert not context.sent
    assert node.refused == 1


def test_relay_that_is_in_no_view_forwards_nothing():
    node, context = relay()
    body = {"shards": [[1], [2]], "engines": [100], "relays": [1001]}
    node.handle(Message(MessageType.VIEW, 2, COORDINATOR, body=body))
    context.sent.clear()
    node.handle(weights(0, 0, epoch=2))
    assert not context.sent
