"""Who is let in, which place it gets, and who is sent away; no processes."""

from __future__ import annotations

import threading
import time

import pytest
from fake_workers import TOKEN, FakeWorker
from waiting import SECONDS, wait_until

from penstock.distributed.control import cluster_manager
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.run_spec import engine_digest, shard_digest, transfers_by_step
from penstock.distributed.worker.main import Worker
from penstock.errors import ClusterError, ConfigError, PenstockError, StorageError


def test_shard_slots_are_assigned_before_engines(open_manager):
    opened = open_manager(shards="apart")
    given = [open_manager.join(opened)[1].body for _ in range(3)]
    assert [body["place"] for body in given] == [[0, 0], [1, 0], None]
    assert [body["node"] for body in given] == [1, 2, 1000]
    assert {body["opens"] for body in given} == {"when asked"}


def test_lost_replica_is_replaced_by_learner(open_manager):
    opened = open_manager(shards="apart", replicas=2, lease=60.0)
    assert opened.launcher.started == 7
    joined = [open_manager.join(opened) for _ in range(7)]
    # On one host: a shard's second place is given when no engine is wanted any more.
    places = [assignment.body["place"] for _, assignment in joined]
    assert places == [[0, 0], [1, 0], None, None, None, [0, 1], [1, 1]]
    for member, assignment in joined:
        member.report_ready(opened.manager, assignment)
    wait_until(lambda: not opened.manager._assignment.is_incomplete)
    wait_until(lambda: len(opened.manager.coordinator.ready) == 3)
    assert opened.manager.coordinator.holders == ((1, 3), (2, 4))
    joined[1][0].connection.close()
    wait_until(lambda: opened.manager.coordinator.holders == ((1, 3), (4,)))
    member, assignment = open_manager.join(opened)
    assert (assignment.body["place"], assignment.body["opens"]) == ([1, 0], "empty")
    node = assignment.body["node"]
    member.report_ready(opened.manager, assignment)
    wait_until(lambda: opened.manager._assignment.learners == [(1, node)])
    assert opened.manager.coordinator.holders == ((1, 3), (4,))  # until it has its copy
    member.connection.close()
    wait_until(lambda: not opened.manager._assignment.learners)
    opened.manager.event_queue.poll()
    assert opened.event_kinds.count("replica lost") == 2
    assert open_manager.join(opened)[1].body["place"] == [1, 0]


def test_failed_learner_does_not_end_run(open_manager):
    opened = open_manager(shards="apart", replicas=2, lease=60.0)
    joined = [open_manager.join(opened) for _ in range(7)]
    for member, assignment in joined:
        member.report_ready(opened.manager, assignment)
    wait_until(lambda: not opened.manager._assignment.is_incomplete)
    joined[0][0].connection.close()
    wait_until(lambda: opened.manager.coordinator.holders[0] == (3,))
    member, assignment = open_manager.join(opened)
    text = {"error": "StorageError", "text": "no space left"}
    member.say(MessageType.FAILURE, assignment.body["node"], **text)
    assert member.hear().kind is MessageType.ADMIN_REPLY
    opened.manager.event_queue.poll()
    assert "refused" in opened.event_kinds


def test_slot_of_worker_lost_before_ready_is_reassigned(open_manager):
    opened = open_manager(shards="apart")
    member, first = open_manager.join(opened)
    assert first.body["place"] == [0, 0]
    member.connection.close()
    wait_until(lambda: not opened.manager.registry.joining)
    assert open_manager.join(opened)[1].body["place"] == [0, 0]


@pytest.mark.parametrize("shards", ["here", "apart"])
def test_worker_silent_before_it_is_ready_is_ended(open_manager, shards):
    opened = open_manager(shards=shards, lease=0.02)
    member, assignment = open_manager.join(opened)
    wait_until(lambda: opened.launcher.killed == ["guest-1"])
    wait_until(lambda: not opened.manager.registry.joining)
    opened.manager.event_queue.poll()
    assert opened.event_kinds == ["worker silent"]
    wait_until(lambda: not member.connection.is_open)
    place = assignment.body["place"]  # free for another
    assert open_manager.join(opened, role=assignment.body["role"])[1].body["place"] == place


def test_worker_that_works_has_unlimited_time_to_become_ready(open_manager):
    """The test passes the time: 10 leases of 60 s without a heartbeat, 900 s without work."""
    opened = open_manager(lease=60.0, longest_job=900.0)
    rendezvous, registry = opened.manager._rendezvous, opened.manager.registry
    tick, rendezvous.tick = rendezvous.tick, lambda now: None
    for _ in range(5):
        open_manager.join(opened)
    silent, compiling, waiting, hung, unmeasured = registry.joining
    began, lost_at = rendezvous._detector.now, {}

    def pass_time() -> None:
        for seconds in range(0, 3600, 7):  # no limit is a multiple of 7
            used = {
                compiling: 5 + seconds / 100,  # it shares the processor with many others
                waiting: 5 + seconds / 10_000,  # it asks twice per second whether it may go on
                hung: 5,
                unmeasured: None,
            }
            for connection, each in used.items():
                if connection in registry.joining:
                    body = {"processor_seconds": each}
                    rendezvous.take(connection, Message(MessageType.HEARTBEAT, 0, 0, body=body))
            tick(began + seconds)
            for connection in (silent, *used):
                if connection not in registry.joining:
                    lost_at.setdefault(connection, seconds)

    opened.manager._run_in_endpoint(pass_time)
    assert list(registry.joining) == [compiling, unmeasured]
    assert lost_at == {silent: 602, waiting: 903, hung: 903}
    opened.manager.event_queue.poll()
    assert opened.event_kinds == ["worker silent", "worker hangs", "worker hangs"]


@pytest.fixture
def starts_quickly(monkeypatch) -> None:
    """A worker needs no time to import libraries."""
    monkeypatch.setattr(cluster_manager, "_LEAST_START_SECONDS", 0.0)


def test_time_to_join_is_not_that_of_a_short_job(open_manager):
    opened = open_manager(longest_job=1.0)
    seconds = cluster_manager._LEAST_START_SECONDS
    assert opened.manager._supervisor._join_seconds == seconds
    assert opened.manager._rendezvous._hang_detector._limit == seconds


@pytest.mark.usefixtures("starts_quickly")
def test_workers_that_do_not_join_are_ended_and_three_of_them_end_the_run(open_manager):
    """Their processes are stopped, or hang in the import of a library."""
    opened = open_manager(longest_job=1.0, lease=60.0)
    wait_until(lambda: opened.manager.event_queue.has_failed)
    assert opened.launcher.killed == ["worker-1", "worker-2", "worker-3"]
    with pytest.raises(ClusterError, match=r"3 workers in a row .* worker-3 has not joined within"):
        opened.manager.event_queue.poll()
    assert opened.event_kinds == ["worker hangs"] * 3 + ["not replaced"]


@pytest.mark.usefixtures("starts_quickly")
def test_worker_that_has_joined_may_take_longer(open_manager):
    opened = open_manager(longest_job=1.0, lease=60.0)
    workers = [FakeWorker(opened.manager) for _ in range(3)]
    try:
        for number, worker in enumerate(workers, 1):
            worker.say(MessageType.JOIN, worker=f"worker-{number}", listens=["127.0.0.1", 1])
            worker.hear()
        time.sleep(2.0)
        assert not opened.launcher.killed
    finally:
        for worker in workers:
            worker.endpoint.close()


def test_worker_that_a_user_starts_may_join_late(open_manager):
    opened = open_manager(start="listen", longest_job=0.2)
    time.sleep(1.0)
    assert not opened.launcher.killed


@pytest.mark.usefixtures("starts_quickly")
@pytest.mark.parametrize("hangs", [True, False])
def test_worker_that_hangs_while_it_builds_its_role_is_ended(open_manager, monkeypatch, hangs):
    may_end = threading.Event()

    def build(spec):
        while not (may_end.wait(SECONDS) if hangs else may_end.is_set()):
            pass
        raise StorageError("the test has ended")

    monkeypatch.setattr("penstock.distributed.worker.main.build_engine", build)
    opened = open_manager(longest_job=1.0)
    worker = Worker(opened.manager.address, TOKEN, "guest")
    ended: list[PenstockError] = []

    def serve() -> None:
        try:
            worker.serve()
        except PenstockError as error:
            ended.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        wait_until(lambda: opened.manager.registry.joining)
        if hangs:
            wait_until(lambda: "guest" in opened.launcher.killed)
        else:
            time.sleep(3.0)  # three times as long as it may hang
            assert opened.manager.registry.joining
    finally:
        may_end.set()
        opened.manager.close()
        thread.join(SECONDS)
    assert ended


def test_first_shard_silent_after_it_is_ready_is_lost(open_manager):
    """It has sent no heartbeat yet."""
    opened = open_manager(shards="apart", lease=0.1)
    member, assignment = open_manager.join(opened)
    member.report_ready(opened.manager, assignment)
    wait_until(lambda: opened.launcher.killed == ["guest-1"])
    assert opened.manager.event_queue.counts["shard lost"] == 1
    with pytest.raises(StorageError, match="shard 0 of the store was lost before all shards had"):
        opened.manager.remote_shards()


def test_superfluous_shard_is_refused_and_run_continues(open_manager):
    opened = open_manager(start="listen", shards="apart")
    assert open_manager.join(opened, shard=1)[1].body["place"] == [1, 0]
    answer = open_manager.join(opened, shard=1)[1]
    assert answer.kind is MessageType.ADMIN_REPLY
    expected = "shard 1 of the store needs no other process: all its replicas run"
    assert answer.body["error"] == expected
    opened.manager.event_queue.poll()
    assert opened.event_kinds == ["refused"]


@pytest.mark.parametrize("shards", ["here", "apart"])
def test_worker_with_other_program_ends_run(open_manager, shards):
    opened = open_manager(shards=shards)
    member, assignment = open_manager.join(opened)
    member.say(MessageType.READY, assignment.body["node"], digest="another")
    answer = member.hear()
    assert answer.kind is MessageType.ADMIN_REPLY
    assert "compiled another program than this process" in answer.body["error"]
    with pytest.raises(ClusterError, match="another program"):
        opened.manager.event_queue.poll()
    assert opened.event_kinds == ["refused"]


def test_error_of_worker_keeps_its_class(open_manager):
    opened = open_manager(shards="apart")
    member, assignment = open_manager.join(opened)
    text = {"error": "ConfigError", "text": "model.hf: is not on this host"}
    member.say(MessageType.FAILURE, assignment.body["node"], **text)
    assert member.hear().kind is MessageType.ADMIN_REPLY
    with pytest.raises(ConfigError, match=r"shard 0 could not be created: model\.hf: is not on"):
        opened.manager.remote_shards()


def test_worker_gets_requested_role(open_manager):
    opened = open_manager(shards="apart")
    roles = ("engine", "shard", "engine", "shard")
    given = [open_manager.join(opened, role=role)[1].body["place"] for role in roles]
    assert given == [None, [0, 0], None, [1, 0]]


def test_shard_waits_for_slot_while_other_hosts_may_join(open_manager):
    opened = open_manager(shards="apart", replicas=2, lease=60.0)
    joined = [open_manager.join(opened, role="shard") for _ in range(2)]
    waiting = open_manager.arrive(opened, role="shard")
    wait_until(lambda: len(opened.manager._rendezvous._waiting) == 1)  # beside those of its host
    elsewhere = open_manager.arrive(opened, host="127.0.0.2", role="shard")
    assert elsewhere.hear().body["place"] == [0, 1]
    assert waiting.hear().body["place"] == [1, 1]  # nobody else is to come
    late = open_manager.arrive(opened, role="shard")
    wait_until(lambda: len(opened.manager._rendezvous._waiting) == 1)
    joined[0][0].connection.close()
    assert late.hear().body["place"] == [0, 0]
    gone = open_manager.arrive(opened, role="shard")
    wait_until(lambda: len(opened.manager._rendezvous._waiting) == 1)
    gone.connection.close()
    wait_until(lambda: not opened.manager._rendezvous._waiting)


@pytest.mark.parametrize("role", ["engine", "shard"])
def test_unfit_host_is_refused_and_run_continues(open_manager, role):
    opened = open_manager(shards="apart")
    member, assignment = open_manager.join(opened, role=role)
    text = {"error": "UnfitHostError", "text": "host7 has no GPU"}
    member.say(MessageType.FAILURE, assignment.body["node"], **text)
    answer = member.hear()
    assert answer.kind is MessageType.ADMIN_REPLY
    assert answer.body["error"].endswith("could not be created: host7 has no GPU")
    opened.manager.event_queue.poll()
    assert opened.event_kinds == ["refused"]
    _, again = open_manager.join(opened, role=role)
    assert again.body["place"] == assignment.body["place"]


def test_device_and_library_change_engine_digest(layout):
    program = layout.program
    transfers = transfers_by_step(program, layout.schedule_of, 2)
    ways = [("cpu", "torch"), ("cpu", "onednn"), ("cuda", "torch")]
    digests = {engine_digest(program, transfers, device, products) for device, products in ways}
    assert len(digests) == len(ways)
    assert shard_digest(program, transfers) not in digests


def test_worker_without_role_becomes_relay_when_engines_are_complete(open_manager):
    opened = open_manager(relays=2, lease=60.0)
    assert opened.launcher.roles.count("relay") == 2
    joined = [open_manager.join(opened) for _ in range(6)]
    roles = [assignment.body["role"] for _, assignment in joined]
    assert roles == ["engine"] * 3 + ["relay"] * 2 + ["engine"]
    for member, assignment in joined:
        member.report_ready(opened.manager, assignment)
    membership = opened.manager.coordinator.membership
    wait_until(lambda: len(membership.relays) == 2 and len(membership.engines) == 4)
    joined[3][0].connection.close()
    wait_until(lambda: len(membership.relays) == 1)
    assert open_manager.join(opened)[1].body["role"] == "relay"
    opened.manager.event_queue.poll()
    assert "relay lost" in opened.event_kinds
    assert "engine lost" not in opened.event_kinds


def test_relay_with_another_program_is_refused_and_run_continues(open_manager):
    opened = open_manager(relays=1)
    member, assignment = open_manager.join(opened, role="relay")
    assert assignment.body["role"] == "relay"
    member.say(MessageType.READY, assignment.body["node"], digest="another")
    answer = member.hear()
    assert answer.body["error"].startswith(f"relay {assignment.body['node']} compiled another")
    opened.manager.event_queue.poll()
    assert "refused" in opened.event_kinds


@pytest.mark.parametrize("relays", [-1, "2", 5000, True])
def test_invalid_number_of_relays_is_refused(open_manager, relays):
    opened = open_manager(relays=1)
    reply = opened.manager._handle_admin_request({"engines": 2, "relays": relays})
    assert reply["error"].startswith("relays: expected 0 to 4096, got")


def test_relays_are_started_for_a_changed_number(open_manager):
    opened = open_manager(relays=1)
    reply = opened.manager._handle_admin_request({"relays": 3})
    assert reply == {"engines": 2, "relays": 3, "before": 2, "relays_before": 1}
    assert opened.launcher.roles.count("relay") == 3
    reply = opened.manager._handle_admin_request({"engines": 3})
    assert (reply["relays_before"], reply["relays"]) == (3, 3)  # fabric.relays is a number
