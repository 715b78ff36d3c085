"""A shared execution plan, cluster managers with fake workers, and replicated shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_workers import FakeWorker, OpenedManager, config, model_source
from replicated_run import EIGHT_BIT, PROGRAM, Run
from store_programs import flash_store, training_store

from penstock.distributed.protocol.messages import Message, MessageType
from penstock.planning.execution_plan import ExecutionPlan, plan_execution
from penstock.store import portions


@pytest.fixture(scope="session")
def layout(tmp_path_factory) -> ExecutionPlan:
    made = config(tmp_path_factory.mktemp("layout"))
    return plan_execution(made, model_source(), "cpu", 16)


@pytest.fixture
def open_manager(tmp_path, layout) -> Iterator:
    made: list[OpenedManager] = []
    registry: list[FakeWorker] = []

    def open_cluster(always_fails: bool = False, **cluster) -> OpenedManager:
        made.append(OpenedManager(tmp_path, layout, always_fails, **cluster))
        return made[-1]

    def arrive(opened: OpenedManager, host: str = "127.0.0.1", **says) -> FakeWorker:
        registry.append(FakeWorker(opened.manager))
        registry[-1].say(
            MessageType.JOIN, worker=f"guest-{len(registry)}", listens=[host, 1], **says
        )
        return registry[-1]

    def join(opened: OpenedManager, **says) -> tuple[FakeWorker, Message]:
        member = arrive(opened, **says)
        return member, member.hear()

    open_cluster.arrive, open_cluster.join = arrive, join
    yield open_cluster
    for member in registry:
        member.endpoint.close()
        assert not member.failures
    for opened in made:
        opened.manager.close()


@pytest.fixture
def in_memory():
    def make(node, replica=None):
        store = training_store(PROGRAM, "bf16", optimizer=EIGHT_BIT)
        store.number = node - 1 if replica is None else replica
        return store

    return Run(make)


@pytest.fixture
def on_flash(tmp_path):
    made = []

    def make(node, replica=None):
        folder = Path(tmp_path) / f"node-{node}"
        made.append(flash_store(PROGRAM, folder, optimizer=EIGHT_BIT))
        made[-1].number = node - 1 if replica is None else replica
        return made[-1]

    yield Run(make, flash={"path": str(tmp_path)})
    for store in made:
        store.close()


@pytest.fixture(params=["in memory", "on flash"])
def run(request):
    return request.getfixturevalue(request.param.replace(" ", "_"))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(portions, "PORTION_BYTES", 1_000)  # several of the larger weights
