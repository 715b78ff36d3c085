"""Sparse runs with engines that speak the step protocol: the bits of one engine in one process.

Workers are threads of this process; their messages go through sockets.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path

import pytest
from grids import quick_first
from sparse_choices import chosen, kernels
from typer.testing import CliRunner
from waiting import SECONDS, wait_until

from penstock.cli.app import app
from penstock.distributed.rendezvous_file import read_record
from penstock.distributed.worker import main, roles
from penstock.distributed.worker.engine_executor import LocalEngineExecutor
from penstock.distributed.worker.main import Worker
from penstock.errors import ClusterError, ConfigError
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
        config = told["config"]
        key = str((told["sparse"], told["shards"], config["precision"], config["sparsity"]))
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


def result_of(
    config: dict, engines: int = 0, stop: int = 0
) -> tuple[list[float], str, list, list[str]]:
    """Train, up to step `stop`; return losses, hash of the weights, figures of the masks, and what
    was lost."""
    events: list = []

    def hear(event) -> None:
        events.append(event)
        if isinstance(event, StepDone) and event.step == stop:
            trainer.request_stop()

    trainer = Trainer(config, on_event=hear)
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
            members = ready.membership
            wait_until(lambda: len((*members.engines, *members.relays)) == engines, events)
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


@pytest.fixture(scope="module")
def alone_with(text, tmp_path_factory):
    """Return what one engine in one process gives."""

    @functools.cache
    def alone(method="rigl", precision="fp32"):
        folder = tmp_path_factory.mktemp("one")
        return result_of(settings(text, folder, method, precision=precision))

    return alone


CLUSTER = {"start": "listen", "spare": 0, "lease": 60.0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "precision", "engines", "shards", "relays"),
    [
        ("rigl", "fp32", 2, 1, 0),
        pytest.param("gmp", "bf16", 1, 2, 0, marks=pytest.mark.long),
        pytest.param("set", "fp32", 3, 3, 0, marks=pytest.mark.long),
        pytest.param("rigl", "fp32", 2, 2, 3, marks=pytest.mark.long),
    ],
)
def test_engines_elsewhere_have_the_bits_of_one_process(
    method, precision, engines, shards, relays, text, alone_with, tmp_path
):
    alone = alone_with(method, precision)
    assert any(changed for _, changed, _ in alone[2])
    config = settings(
        text,
        tmp_path / "many",
        method,
        precision=precision,
        engines=engines,
        cluster=CLUSTER,
        store={"shards": shards},
        fabric={"relays": relays},
    )
    assert result_of(config, engines + relays) == alone


def test_shards_in_this_process_have_the_bits_of_one_store(text, alone_with, tmp_path):
    found = result_of(settings(text, tmp_path, store={"shards": 3}, engines=2))
    assert found == alone_with()


@pytest.mark.long
@pytest.mark.parametrize("step", quick_first([3, 4], [3]))
def test_engine_lost_around_a_mask_change_changes_no_bit(
    step, text, alone_with, tmp_path, monkeypatch
):
    alone = alone_with()
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "store"),
    [("rigl", {"shards": 2}), ("gmp", {"shards": 1, "replicas": 2})],
    ids=["two shards", "a replica"],
)
def test_shards_in_other_processes_have_the_bits_of_one_store(
    method, store, text, alone_with, tmp_path
):
    alone = alone_with(method)
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


def on_flash(text: Path, folder: Path, shards: int, method: str = "rigl", **changes) -> dict:
    """Settings of a run on flash."""
    store = {"shards": shards, "dram": "24MiB", "flash": {"path": str(folder / "flash")}}
    changes["store"] = {**store, **changes.get("store", {})}
    return settings(text, folder, method, **changes)


@pytest.fixture(scope="module")
def alone_in_memory(text, tmp_path_factory):
    """The result of a method in one process, with a store in memory."""

    @functools.cache
    def alone(method: str):
        folder = tmp_path_factory.mktemp("alone")
        return result_of({**on_flash(text, folder, 1, method), "store": {}})

    return alone


FLASH = [("rigl", 2, 2), ("set", 1, 1), ("gmp", 1, 3)]
"""Method, engines and shards."""


@pytest.mark.long
@pytest.mark.parametrize("case", quick_first(FLASH, FLASH[:1]), ids=str)
def test_store_on_flash_with_engines_elsewhere_has_the_bits_of_one_process(
    case, text, tmp_path, alone_in_memory
):
    """The second half is trained without other processes, on the same files."""
    method, engines, shards = case
    alone, folder = alone_in_memory(method), tmp_path / "run"
    config = on_flash(text, folder, shards, method, engines=engines, cluster=CLUSTER)
    losses, _, figures, lost = result_of(config, engines, stop=4)
    assert len(losses) == 4
    assert not lost
    more, weights, after, _ = result_of(on_flash(text, folder, shards, method))
    assert (losses + more, weights, figures + after) == alone[:3]


class Killed:
    """A run whose shards are processes, of which one is killed after a step."""

    def __init__(self, config: dict, step: int) -> None:
        self.losses: dict[int, float] = {}
        self.kinds: list[str] = []
        self._step = step
        self.trainer = Trainer(config, on_event=self._hear)

    def _hear(self, event) -> None:
        if isinstance(event, ClusterEvent):
            self.kinds.append(event.kind)
        elif isinstance(event, StepDone):
            # A step that is made again has the bits of the first time.
            assert self.losses.setdefault(event.step, event.loss) == event.loss
            if event.step == self._step:
                self._step = -1
                self._kill()

    def _kill(self) -> None:
        manager = self.trainer._runner.manager
        node = manager.registry.find(manager.coordinator.holders[0][0])
        os.kill(manager.launcher.pids[node.worker], signal.SIGKILL)

    def train(self) -> tuple[list[float], str]:
        try:
            self.trainer.train()
            return [
                self.losses[step] for step in sorted(self.losses)
            ], self.trainer.store.content_hash()
        finally:
            self.trainer.close()


@pytest.mark.long
@pytest.mark.parametrize("step", [3, 4])
def test_shard_on_flash_that_is_killed_around_a_mask_change_changes_no_bit(
    step, text, tmp_path, alone_in_memory
):
    """Masks change at the commit of steps 3 and 6; a shard opens at its last durable step."""
    cluster = {"start": "local", "spare": 0, "lease": 60.0, "shards": "apart"}
    run = Killed(on_flash(text, tmp_path / "run", 2, cluster=cluster), step)
    losses, _, *_ = alone_in_memory("rigl")
    assert run.train() == (losses, alone_in_memory("rigl")[1])
    assert "shard lost" in run.kinds
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--hash"])
    assert result.output.strip() == alone_in_memory("rigl")[1]


@pytest.mark.long
def test_single_shard_on_flash_continues_in_the_trainer_and_never_beside_its_own_store(
    text, tmp_path, alone_in_memory
):
    """A shard of another process is opened by the trainer too, not the other way round."""
    cluster = {"start": "local", "spare": 0, "lease": 60.0, "shards": "apart"}
    alone = alone_in_memory("rigl")
    losses, *_ = result_of(on_flash(text, tmp_path / "run", 1, cluster=cluster), stop=4)
    more, weights, *_ = result_of(on_flash(text, tmp_path / "run", 1))
    assert (losses + more, weights) == alone[:2]
    result_of(on_flash(text, tmp_path / "other", 1), stop=4)
    with pytest.raises(ConfigError, match="holds a store that the trainer process opens itself"):
        Trainer(on_flash(text, tmp_path / "other", 1, cluster=cluster))


@pytest.mark.long
def test_replica_on_flash_gets_a_copy_of_masks_and_ages(text, tmp_path, alone_in_memory):
    cluster = {"start": "local", "spare": 0, "lease": 60.0, "shards": "apart"}
    store = {"replicas": 2, "dram": "48MiB"}
    run = Killed(on_flash(text, tmp_path / "run", 1, cluster=cluster, store=store), 3)
    losses, weights, *_ = alone_in_memory("rigl")
    assert run.train() == (losses, weights)
    assert "replica lost" in run.kinds
