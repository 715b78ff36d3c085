"""A node sends its spans when it is asked, and keeps none before."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from lone_nodes import begin, engine, gradient, shard, weights

from penstock.distributed.protocol import COORDINATOR, MOST_SPANS, clock_of, measured_of
from penstock.distributed.protocol.messages import Message, MessageType, message_with
from penstock.errors import ProtocolError
from penstock.spans import Spans


class Clock:
    """A clock that advances by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def asked(node, context, keep, number=1) -> Message:
    """Request a node's spans; return its answer."""
    context.sent.clear()
    body = {"keep": keep}
    node.handle(Message(MessageType.SPANS, 0, COORDINATOR, op=number, body=body))
    ((to, answer),) = context.sent
    assert to == COORDINATOR
    assert answer.kind is MessageType.SPANS
    assert (answer.sender, answer.op) == (node.number, number)
    return answer


def test_engine_sends_the_spans_of_its_jobs_from_the_first_request_on():
    node, context, _ = engine(engines=[100])
    node.spans.clock = Clock()
    node.handle(begin(total=1))
    context.do()
    first = asked(node, context, 10)
    assert measured_of(first).spans == ()
    for op in range(2):
        for chunk in range(2):
            node.handle(weights(op, chunk))
    context.do()
    answer = asked(node, context, 10, 2)
    spans = measured_of(answer).spans
    assert [(span.lane, span.what, span.step, span.op) for span in spans] == [
        ("compute", "forward", 1, 0),
        ("compute", "turn", 1, 1),
    ]
    assert first.body["clock"] < spans[0].begin < spans[0].end < spans[1].begin
    assert spans[-1].end < answer.body["clock"]


def test_shard_sends_the_spans_of_its_store_too():
    node, context, work = shard()
    node.spans.clock = clock = Clock()
    work.spans = (Spans(clock),)
    asked(node, context, 3)
    node.handle(begin())
    context.do()
    for op in (1, 2):
        node.handle(gradient(op, 0, 2))
    context.do()
    with work.spans[0].span("update", "weight"):
        pass
    measured = measured_of(asked(node, context, 0))
    assert [(span.lane, span.what, span.op) for span in measured.spans] == [
        ("store", "begin", None),
        ("store", "fetch", 0),
        ("store", "fetch", 1),
        ("update", "weight", None),
    ]
    assert measured.dropped == 3  # two jobs that received gradients, and the report
    with work.spans[0].span("update", "weight"):
        pass
    assert measured_of(asked(node, context, 0)).spans == ()


@pytest.mark.parametrize(
    ("content", "dropped", "expected"),
    [
        (b"", 0, "has no list of spans"),
        (b"{}", 0, "has '{}' as spans"),
        (b"[3]", 0, "has '3' as a span"),
        (b'[["store", "fetch", 1.0, 2.0, null, null]]', 0, "as a span"),
        (b'[["store", "fetch", 1.0, "2", null, null, 0]]', 0, "as a span"),
        (b'[["store", 5, 1.0, 2.0, null, null, 0]]', 0, "as a span"),
        (b'[["store", "fetch", 1.0, 2.0, 1.5, null, 0]]', 0, "as a span"),
        (b"[" * 100_000, 0, "has no list of spans"),
        (b'[["store", "fetch", 1.0, NaN, null, null, 0]]', 0, "as a span"),
        (b'[["store", "fetch", -Infinity, 2.0, null, null, 0]]', 0, "as a span"),
        (b'[["store", "fetch", 1.0, 1' + b"0" * 400 + b", null, null, 0]]", 0, "as a span"),
        (b"[]", -1, "has '-1' as 'dropped', expected an integer of at least 0"),
    ],
)
def test_malformed_spans_are_refused(content, dropped, expected):
    message = message_with(
        np.frombuffer(content, np.uint8),
        kind=MessageType.SPANS,
        epoch=0,
        sender=100,
        body={"clock": 1.0, "dropped": dropped},
    )
    with pytest.raises(ProtocolError, match=f"node 100 sent a SPANS message that .*{expected}"):
        measured_of(message)


@pytest.mark.parametrize("clock", [None, True, "1", math.nan, math.inf, 10**400])
def test_impossible_clocks_are_refused(clock):
    message = Message(MessageType.SPANS, 0, 100, body={"clock": clock, "dropped": 0})
    with pytest.raises(ProtocolError, match="as 'clock', expected a finite number of seconds"):
        clock_of(message)


def test_more_spans_than_were_asked_for_are_refused():
    spans = [["store", "fetch", 1.0, 2.0, None, None, 0]] * 1000
    message = message_with(
        np.frombuffer(json.dumps(spans).encode(), np.uint8),
        kind=MessageType.SPANS,
        epoch=0,
        sender=100,
        body={"clock": 1.0, "dropped": 0},
    )
    assert len(measured_of(message, 1000).spans) == 1000
    with pytest.raises(ProtocolError, match=r"bytes of spans, expected at most"):
        measured_of(message, 5)


@pytest.mark.parametrize("keep", [None, -1, MOST_SPANS + 1])
def test_request_without_a_possible_number_of_spans_is_reported(keep):
    node, context, _ = engine()
    node.handle(Message(MessageType.SPANS, 0, COORDINATOR, body={"keep": keep}))
    assert context.errors() == ["ProtocolError"]
    assert node.spans.keep == 0


def test_request_of_another_node_than_the_coordinator_is_reported_and_drains_nothing():
    node, context, _ = engine()
    asked(node, context, 10)
    with node.spans.span("compute", "forward"):
        pass
    context.sent.clear()
    node.handle(Message(MessageType.SPANS, 0, 101, body={"keep": 0}))
    assert context.kinds() == [MessageType.FAILURE]
    assert context.sent[0][1].body["about"] == 101
    assert [span.what for span in measured_of(asked(node, context, 10)).spans] == ["forward"]
