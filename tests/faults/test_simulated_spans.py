"""The spans of a simulated run are in simulated time, and cost the run no bit."""

from __future__ import annotations

from collections import Counter

import pytest
from sparse_cluster import SparseCluster, alone
from sparse_stores import assert_same_sparse_state

from penstock.distributed.control.span_collector import SpanCollector
from penstock.distributed.protocol import COORDINATOR, MessageType
from penstock.spans import Spans

JOB_SECONDS, LATENCY = 0.002, 1e-4  # of `SparseCluster`
STEPS = 3


@pytest.fixture(scope="module")
def measured():
    """A run of which spans are collected after every step, and what was collected."""
    cluster = SparseCluster("rigl", 2, 2, clip_norm=1.0)
    network, coordinator = cluster.network, cluster.coordinator
    collector = SpanCollector(lambda node, message: network.send(COORDINATOR, node, message))
    spans, handle = Spans(network.clock, keep=1000), coordinator.handle

    def take(message) -> None:
        (collector.take if message.kind is MessageType.SPANS else handle)(message)

    coordinator.handle = take
    found = []
    for step in range(1, STEPS + 1):
        for _ in range(2):  # the first request of the run is answered with nothing
            collector.request(coordinator.membership.participants, spans)
            assert network.run(lambda: not collector._asked, network.now + 1)
            found.append(collector.take_measured())
        cluster.train(step)
    collector.request(coordinator.membership.participants, spans)
    assert network.run(lambda: not collector._asked, network.now + 1)
    return cluster, [found[0], *found[2::2], collector.take_measured()]


def test_collecting_spans_changes_no_bit(measured):
    cluster, _ = measured
    store, _ = alone("rigl", STEPS, clip_norm=1.0)
    assert_same_sparse_state(cluster.store, store)


def test_jobs_take_their_simulated_time(measured):
    _, found = measured
    before, *steps = found
    assert before.spans == ()
    for number, step in enumerate(steps, 1):
        jobs = [span for span in step.spans if "update" not in span.lane]
        between = [span.what for span in jobs if span.step is None]
        asked = ["held steps", "rollback"] * 2 if number == 1 else []  # both shards, once an epoch
        assert sorted(between) == sorted(asked)
        assert {span.step for span in jobs} - {None} == {number}
        assert {round(span.seconds, 9) for span in jobs} == {JOB_SECONDS}
        assert step.dropped == 0


def test_every_operation_of_every_node_has_a_span(measured):
    cluster, found = measured
    operations = cluster.schedules(1).operations
    for step in found[1:]:
        ops = Counter((span.lane, span.what, span.op) for span in step.spans)
        for engine in cluster.engines:
            for each in operations:
                assert ops[f"{engine}: compute", each.sweep, each.number] == 1
        for shard in (1, 2):
            for each in operations:
                assert ops[f"{shard}: store", "fetch", each.number] == 1
            for what in ("begin", "prepare", "commit"):
                assert ops[f"{shard}: store", what, None] == 1


def test_weights_are_fetched_before_they_are_computed(measured):
    """Clocks agree but for the error of their estimate: half of what both ways take."""
    _, found = measured
    for step in found[1:]:
        ends = {(span.lane, span.op): span.end for span in step.spans if span.what == "fetch"}
        for span in step.spans:
            if "compute" in span.lane and span.op is not None:
                for shard in (1, 2):
                    assert ends[f"{shard}: store", span.op] <= span.begin + LATENCY
