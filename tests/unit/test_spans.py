"""Spans of time: sums by lane are always there, the spans themselves where they are asked for."""

import threading
import time

import pytest

from penstock.spans import Measured, Span, Spans, gather


class Clock:
    """Simulated time: it passes when it is told to."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


def test_seconds_are_sum_of_lane_spans():
    clock = Clock()
    spans = Spans(clock)
    for seconds, lane in ((1.0, "store"), (0.5, "compute"), (2.25, "store")):
        with spans.span(lane, "work"):
            clock.now += seconds
        clock.now += 10  # between spans
    assert spans.seconds("store") == 3.25
    assert spans.seconds("compute") == 0.5
    assert spans.seconds("never") == 0.0
    assert spans.drain() == Measured({"store": 3.25, "compute": 0.5})
    assert spans.drain() == Measured()


def test_spans_are_kept_up_to_limit():
    clock = Clock(0.0)
    spans = Spans(clock, keep=2)
    for op in range(3):
        with spans.span("store", "fetch", step=7, op=op, bytes=10 * op):
            clock.now += 1 + op
    found = spans.drain()
    assert found.spans == (
        Span("store", "fetch", 0.0, 1.0, 7, 0, 0),
        Span("store", "fetch", 1.0, 3.0, 7, 1, 10),
    )
    assert [span.seconds for span in found.spans] == [1.0, 2.0]
    assert found.dropped == 1
    assert found.seconds == {"store": 6.0}  # nothing that was dropped is missing here
    with spans.span("store", "fetch"):
        clock.now += 1
    assert len(spans.drain().spans) == 1  # there is room again


def test_span_ends_at_error():
    clock = Clock()
    spans = Spans(clock)

    def fetch():
        with spans.span("store", "fetch"):
            clock.now += 2
            raise KeyError("weight")

    with pytest.raises(KeyError, match="weight"):
        fetch()
    assert spans.seconds("store") == 2.0


def test_running_span_counts_in_drain_after_its_end():
    clock = Clock()
    spans = Spans(clock)
    with spans.span("store", "fetch"):
        clock.now += 2
        assert spans.drain() == Measured()
        clock.now += 1
    assert spans.drain() == Measured({"store": 3.0})


def test_nested_lanes_count_separately():
    clock = Clock()
    spans = Spans(clock)
    with spans.span("step", "run"):
        clock.now += 1
        with spans.span("store", "fetch"):
            clock.now += 2
    assert spans.drain().seconds == {"store": 2.0, "step": 3.0}


def test_threads_lose_no_span():
    spans, count = Spans(keep=4000), 1000

    def work(lane):
        for number in range(count):
            with spans.span(lane, "work", op=number):
                pass

    threads = [threading.Thread(target=work, args=(f"lane {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    found = [spans.drain() for _ in range(50)]
    for thread in threads:
        thread.join()
    kept = [span for each in (*found, spans.drain()) for span in each.spans]
    for n in range(4):
        own = [span.op for span in kept if span.lane == f"lane {n}"]
        assert own == list(range(count))


def test_negative_limit_is_refused():
    with pytest.raises(ValueError, match="keep: expected 0 or more spans, got -1"):
        Spans(keep=-1)


def test_default_clock_is_host_clock():
    before = time.perf_counter()
    assert before <= Spans().clock() <= time.perf_counter()


def test_taken_seconds_do_not_depend_on_drains():
    clock = Clock()
    spans = Spans(clock)
    for seconds in (1.0, 2.0):
        with spans.span("update", "weight"):
            clock.now += seconds
        spans.drain()
    assert spans.take_seconds("update") == 3.0
    assert spans.take_seconds("update") == 0.0
    assert spans.take_seconds("never") == 0.0
    assert spans.seconds("update") == 3.0
    with spans.span("update", "weight"):
        clock.now += 4.0
    assert spans.take_seconds("update") == 4.0
    assert spans.drain() == Measured({"update": 4.0})


def test_gathered_parts_keep_as_many_spans_as_their_owner():
    clock = Clock(0.0)
    own, store, flash = (Spans(clock) for _ in range(3))

    def measure():
        for spans, lane in ((own, "store"), (store, "update"), (flash, "flash")):
            with spans.span(lane, "work"):
                clock.now += 1

    own.keep = 1
    measure()
    first = gather(own, (store, flash))
    assert first == Measured({"store": 1.0}, (Span("store", "work", 0.0, 1.0),))
    measure()
    measure()
    second = gather(own, (store, flash))
    assert second.seconds == {"store": 2.0}
    assert [span.lane for span in second.spans] == ["store", "update", "flash"]
    assert second.dropped == 3
    own.keep = 0
    gather(own, (store, flash))
    measure()
    assert gather(own, (store, flash)).spans == ()
