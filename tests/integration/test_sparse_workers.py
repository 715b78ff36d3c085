"""Sparse runs with engines that speak the step protocol: the bits of one engine in one process.

Workers are threads of this process; their messages go through sockets.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from grids import quick_first
from sparse_choices import chosen, kernels
from waiting import SECONDS, wait_until

from penstock.distributed.rendezvous_file import read_record
from penstock.distributed.worker import main, roles
from penstock.distributed.worker.engine_executor import LocalEngineExecutor
from penstock.distributed.worker.main import Worker
from penstock.errors import ClusterError
from penstock.telemetry.events import ClusterEvent, StepDone
from penstock.training.trainer import Trainer

MODEL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 260, "n_positions": 16}
KEYS = {
    "rigl": {"update_every": 3, "update_end": 7},
    "set": {"update_every": 3},
    "gmp": {"update_every": 3, "schedule": {"begin": 2, "end": 7}},
}
_ONE_AT_A_TIME = threading.Lock()
_COMPILE = roles._compile
_COMPILED: dict = {}


def compiled_once(told, device, products):
    """PyTorch compiles in one thread at a time."""
    with _ONE_AT_A_TIME:
        key = str((told["sparse"], told["shards"], told["config"]["precision"]))
        if key not in _COMPILED:
            _COMPILED[key] = _COMPILE(told, device, products)
        return _COMPILED[key]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(main, "_RECONNECT_SECONDS", 0.2)
    monkeypatch.setattr(roles, "_compile", compiled_once)
    with chosen(kernels):
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"line {i}: {'water ' * (i % 7)}" for i in range(300)))
    return path


def settings(text: Path, folder: Path, method: str = "rigl", **changes) -> dict:
    return {
        "model": {"preset": "gpt2", "overrides": MODEL},
        "data": {"input": [str(text)], "path": str(text.parent / "data")},
        "batch": {"size": 4, "micro": 1},
        "engine": {"threads": 1, "device": "cpu"},
        "sparsity": {"method": method, "sparsity": 0.8, **KEYS[method]},
        "run": {"dir": str(folder), "steps": 8},
        **changes,
    }


def result_of(config: dict, engines: int = 0) -> tuple[list[float], str, list, list[str]]:
    """Train; return losses, hash of the weights, figures of the masks, and what was lost."""
    events: list = []
    trainer = Trainer(config, on_event=events.append)
    threads: list[threading.Thread] = []
    try:
        if engines:
            address, token = read_record(Path(config["run"]["dir"]) / "cluster.json")

            def serve() -> None:
                try:
                    Worker(address, token).serve()
                except ClusterError as error:
                    events.append(error)

            threads += [threading.Thread(target=serve, daemon=True) for _ in range(engines)]
            for thread in threads:
                thread.start()
            ready = trainer._runner.manager.coordinator
            wait_until(lambda: len(ready.ready) == engines, events)
        trainer.train()
        weights = trainer.store.content_hash()
    finally:
        trainer.close()
        for thread in threads:
            thread.join(timeout=SECONDS)
            assert not thread.is_alive()
    done = [event for event in events if isinstance(event, StepDone)]
    figures = [(each.sparsity, each.changed_entries, each.flops) for each in done]
    lost = [e.text for e in events if isinstance(e, ClusterEvent) and "lost" in e.kind]
    return [event.loss for event in done], weights, figures, lost


CLUSTER = {"start": "listen", "spare": 0, "lease": 60.0}


@pytest.mark.parametrize(
    ("method", "precision", "engines", "shards"),
    [
        ("rigl", "fp32", 2, 1),
        pytest.param("gmp", "bf16", 1, 2, marks=pytest.mark.long),
        pytest.param("set", "fp32", 3, 3, marks=pytest.mark.long),
    ],
)
def test_engines_elsewhere_have_the_bits_of_one_process(
    method, precision, engines, shards, text, tmp_path
):
    config = settings(text, tmp_path / "one", method, precision=precision)
    alone = result_of(config)
    assert any(changed for _, changed, _ in alone[2])
    config = settings(
        text,
        tmp_path / "many",
        method,
        precision=precision,
        engines=engines,
        cluster=CLUSTER,
        store={"shards": shards},
    )
    assert result_of(config, engines) == alone


def test_shards_in_this_process_have_the_bits_of_one_store(text, tmp_path):
    alone = result_of(settings(text, tmp_path / "one"))
    assert result_of(settings(text, tmp_path / "many", store={"shards": 3}, engines=2)) == alone


@pytest.mark.parametrize("step", quick_first([3, 4], [3]))
def test_engine_lost_around_a_mask_change_changes_no_bit(step, text, tmp_path, monkeypatch):
    alone = result_of(settings(text, tmp_path / "one"))
    began, computed, failed = LocalEngineExecutor.begin, LocalEngineExecutor.compute, []

    def begin(self, number, part, rows):
        self.step = number
        return began(self, number, part, rows)

    def compute(self, operation):
        if self.step == step and operation.sweep == "backward" and not failed:
            failed.append(self)
            raise RuntimeError("a device was lost")
        return computed(self, operation)

    monkeypatch.setattr(LocalEngineExecutor, "begin", begin)
    monkeypatch.setattr(LocalEngineExecutor, "compute", compute)
    store = {"shards": 2}
    config = settings(text, tmp_path / "many", engines=2, cluster=CLUSTER, store=store)
    *result, lost = result_of(config, 2)
    assert len(lost) == 1
    assert tuple(result) == alone[:3]


@pytest.mark.parametrize(
    ("method", "store"),
    [
        ("rigl", {"shards": 2}),
        pytest.param("gmp", {"shards": 1, "replicas": 2}, marks=pytest.mark.long),
    ],
    ids=["two shards", "a replica"],
)
def test_shards_in_other_processes_have_the_bits_of_one_store(method, store, text, tmp_path):
    alone = result_of(settings(text, tmp_path / "one", method))
    cluster = {"start": "local", "spare": 0, "lease": 60.0, "shards": "apart"}
    config = settings(text, tmp_path / "many", method, engines=2, cluster=cluster, store=store)
    *result, lost = result_of(config)
    assert not lost
    assert tuple(result) == alone[:3]
    # The checkpoint of such a run continues in one process, with every bit.
    more = {"run": {"dir": str(tmp_path / "many"), "steps": 8}}
    resumed = Trainer({**settings(text, tmp_path / "many", method), **more})
    try:
        assert resumed.resumed_from == 8
        assert resumed.store.content_hash() == alone[1]
    finally:
        resumed.close()
