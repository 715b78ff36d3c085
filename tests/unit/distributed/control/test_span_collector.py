"""The spans of processes with clocks of their own, on one clock."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.distributed.control.span_collector import SpanCollector
from penstock.distributed.protocol.messages import MessageType
from penstock.distributed.protocol.span_messages import spans_message
from penstock.errors import ProtocolError
from penstock.spans import Measured, Span, Spans


class Process:
    """A node whose clock is ahead of the trainer's; messages take as long as it says."""

    def __init__(self, ahead: float) -> None:
        self.ahead, self.there, self.back = ahead, 0.5, 0.5
        self.spans: tuple[Span, ...] = ()


class Run:
    """A collector and its nodes in simulated time."""

    def __init__(self, **ahead: float) -> None:
        self.now = 100.0
        self.nodes = {int(name[1:]): Process(seconds) for name, seconds in ahead.items()}
        self.requests = []
        self.collector = SpanCollector(lambda node, m: self.requests.append((node, m)))
        self.spans = Spans(lambda: self.now, keep=7)

    def ask(self) -> None:
        self.collector.request(list(self.nodes), self.spans)

    def answer(self) -> Measured:
        """Answer the requests in order; each node was asked at the same time."""
        asked, requests, self.requests = self.now, self.requests, []
        for node, request in requests:
            assert request.kind is MessageType.SPANS
            assert request.body == {"keep": 7}
            process = self.nodes[node]
            self.now = asked + process.there
            clock = self.now + process.ahead
            self.now += process.back
            measured = Measured({}, process.spans, 1)
            self.collector.take(spans_message(request, node, lambda clock=clock: clock, measured))
        return self.collector.take_measured()


def test_spans_are_on_the_clock_of_the_trainer():
    run = Run(n1=1000.0, n100=-40.0)
    run.nodes[1].spans = (Span("store", "fetch", 1090.0, 1092.0, 3, 1, 16),)
    run.nodes[100].spans = (Span("compute", "turn", 53.0, 54.5, 3, 2),)
    run.ask()
    found = run.answer()
    assert found.spans == (
        Span("1: store", "fetch", 90.0, 92.0, 3, 1, 16),
        Span("100: compute", "turn", 93.0, 94.5, 3, 2),
    )
    assert found.dropped == 2
    assert run.collector.take_measured() == Measured()


def test_the_closest_answer_says_most_of_a_clock():
    """Error of an estimate: at most half of the time between request and answer."""
    run = Run(n1=10.0)
    process = run.nodes[1]
    for there, back, expected in ((0.0, 8.0, -6.0), (1.0, 1.0, -10.0), (9.0, 0.0, -10.0)):
        process.there, process.back = there, back
        process.spans = (Span("store", "fetch", 0.0, 1.0),)
        run.ask()
        (span,) = run.answer().spans
        assert (span.begin, span.end) == pytest.approx((expected, expected + 1.0))


def test_late_answers_keep_their_spans_and_say_nothing_of_the_clock():
    run = Run(n1=10.0)
    run.ask()
    run.answer()
    run.nodes[1].spans = (Span("store", "fetch", 120.0, 121.0),)
    run.ask()
    late, run.requests = run.requests, []
    run.now += 50.0
    run.ask()
    answered, run.requests = run.requests, late
    assert [span.begin for span in run.answer().spans] == [110.0]
    run.nodes[1].spans, run.requests = (), answered
    assert run.answer().spans == ()


def test_a_lost_node_is_not_waited_for_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr("penstock.distributed.control.span_collector._WAIT_SECONDS", 0.01)
    run = Run(n1=0.0)
    assert run.collector.collect([1], run.spans) == Measured()
    assert [node for node, _ in run.requests] == [1]


def test_answers_that_nobody_asked_for_change_nothing():
    run = Run(n1=10.0)
    run.nodes[1].spans = (Span("store", "fetch", 120.0, 121.0),)
    run.ask()
    ((_, request),) = run.requests
    assert len(run.answer().spans) == 1
    again = Measured({}, run.nodes[1].spans, 1)
    for node, number in ((1, request.op), (1, request.op + 5), (2, request.op)):
        message = spans_message(replace(request, op=number), node, lambda: 0.0, again)
        run.collector.take(message)
    assert run.collector.take_measured() == Measured()


def test_malformed_answer_is_refused_and_not_waited_for():
    run = Run(n1=0.0)
    run.ask()
    ((_, request),) = run.requests
    with pytest.raises(ProtocolError, match="as 'clock'"):
        run.collector.take(spans_message(request, 1, lambda: math.nan, Measured()))
    assert not run.collector._asked
    assert run.collector.take_measured() == Measured()


def test_nodes_are_told_once_that_no_spans_are_wanted_any_more(monkeypatch):
    monkeypatch.setattr("penstock.distributed.control.span_collector._WAIT_SECONDS", 0.01)
    run = Run(n1=0.0)
    run.collector.collect([1], run.spans)
    run.spans.keep = 0
    for _ in range(3):
        run.collector.collect([1], run.spans)
    assert [request.body["keep"] for _, request in run.requests] == [7, 0]
