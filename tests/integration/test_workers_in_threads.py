"""Runs whose workers are threads of this process: what comes of errors that engines meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from waiting import SECONDS, wait_until

from penstock.distributed.rendezvous_file import read_record
from penstock.distributed.worker import main, roles
from penstock.distributed.worker.engine_executor import LocalEngineExecutor
from penstock.distributed.worker.main import OwnWorkError, Worker
from penstock.errors import ClusterError, NonFiniteError
from penstock.telemetry.events import ClusterEvent, StepDone
from penstock.training.trainer import Trainer

MODEL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 260, "n_positions": 16}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"line {i}: {'water ' * (i % 7)}" for i in range(300)))
    return path


def settings(text: Path, folder: Path, **changes) -> dict:
    return {
        "model": {"preset": "gpt2", "overrides": MODEL},
        "data": {"input": [str(text)], "path": str(text.parent / "data")},
        "batch": {"size": 4, "micro": 1},
        "engine": {"threads": 1, "device": "cpu"},
        "run": {"dir": str(folder), "steps": 6},
        **changes,
    }


_ONE_AT_A_TIME = threading.Lock()
_COMPILE = roles._compile
_COMPILED: list = []


def compiled_once(told, device, products):
    """PyTorch compiles in one thread at a time; the model of all these runs is one."""
    with _ONE_AT_A_TIME:
        _COMPILED.append(_COMPILED[0] if _COMPILED else _COMPILE(told, device, products))
        return _COMPILED[0]


class Company:
    """A run with two engines, and how its workers ended."""

    def __init__(self, config: dict) -> None:
        self.events: list = []
        self.trainer = Trainer(config, on_event=self.events.append)
        address, token = read_record(Path(config["run"]["dir"]) / "cluster.json")
        self.ended: list[Exception | None] = []

        def serve() -> None:
            try:
                Worker(address, token).serve()
            except ClusterError as error:
                self.ended.append(error)
            else:
                self.ended.append(None)

        self.threads = [threading.Thread(target=serve, daemon=True) for _ in range(2)]
        for thread in self.threads:
            thread.start()
        # The trainer compiles too when it begins.
        wait_until(lambda: len(self.trainer._runner.manager.coordinator.ready) == 2, self.ended)

    def steps(self) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone)]

    def lost(self) -> list[str]:
        return [e.text for e in self.events if isinstance(e, ClusterEvent) and "lost" in e.kind]

    def close(self) -> None:
        self.trainer.close()
        for thread in self.threads:
            thread.join(timeout=SECONDS)
            assert not thread.is_alive()


@pytest.fixture
def company(text, tmp_path, monkeypatch) -> Iterator[Callable[..., Company]]:
    monkeypatch.setattr(main, "_RECONNECT_SECONDS", 0.2)
    monkeypatch.setattr(roles, "_compile", compiled_once)
    made: list[Company] = []

    def make(**changes) -> Company:
        cluster = {"start": "listen", "spare": 0, "lease": 30.0}
        config = settings(text, tmp_path / "many", engines=2, cluster=cluster, **changes)
        made.append(Company(config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def alone(text: Path, folder: Path, **changes) -> list[float]:
    losses: list[float] = []
    trainer = Trainer(
        settings(text, folder, **changes),
        on_event=lambda event: losses.append(event.loss) if isinstance(event, StepDone) else None,
    )
    try:
        trainer.train()
    finally:
        trainer.close()
    return losses


def fail_at(monkeypatch, step: int, first_only: bool) -> None:
    """Have the work of engines fail at a step: that of whoever comes to it first, or of all."""
    began, computed, failed = LocalEngineExecutor.begin, LocalEngineExecutor.compute, []
    lock = threading.Lock()

    def begin(self, number, part, rows):
        self.step = number
        return began(self, number, part, rows)

    def compute(self, operation):
        if self.step == step and operation.sweep == "backward":
            with lock:
                if not failed or not first_only or self in failed:
                    failed.append(self)
                    raise RuntimeError("CUDA error: device-side assert triggered")
        return computed(self, operation)

    monkeypatch.setattr(LocalEngineExecutor, "begin", begin)
    monkeypatch.setattr(LocalEngineExecutor, "compute", compute)


@pytest.mark.long
def test_failed_engine_changes_no_bit_and_its_worker_reports_the_error(
    company, text, tmp_path, monkeypatch
):
    fail_at(monkeypatch, 3, first_only=True)
    run = company()
    run.trainer.train()
    assert [done.loss for done in run.steps()] == alone(text, tmp_path / "one")
    (line,) = run.lost()
    assert line.endswith("its work failed: RuntimeError: CUDA error: device-side assert triggered")
    (ended,) = run.ended
    assert isinstance(ended, OwnWorkError)
    assert "the run continues without it: RuntimeError: CUDA error" in str(ended)
    # Where a step's time went is what engines say that they have computed, and the rest.
    done = run.steps()
    assert 0 < sum(each.compute_seconds for each in done) < sum(each.seconds for each in done)
    assert sum(each.weight_seconds for each in done) > 0
    for each in done:
        parts = each.compute_seconds + each.weight_seconds + each.update_seconds
        assert parts + each.snapshot_seconds == pytest.approx(each.seconds)


@pytest.mark.long
def test_error_of_every_engine_ends_the_run_with_its_text(company, monkeypatch):
    fail_at(monkeypatch, 3, first_only=False)
    run = company()
    with pytest.raises(ClusterError, match=r"step 3: engines 100. and 100. failed with the same e"):
        run.trainer.train()
    assert [done.step for done in run.steps()] == [1, 2]
    assert run.trainer.step == 2


def test_non_finite_loss_is_traced_to_its_stage_as_in_one_process(company, text, tmp_path):
    wild = {"optimizer": {"learning_rate": 1e30}}
    with pytest.raises(NonFiniteError) as there:
        alone(text, tmp_path / "one", **wild)
    assert "is the first stage whose output is not finite. The step was not" in str(there.value)
    with pytest.raises(NonFiniteError) as here:
        company(**wild).trainer.train()
    assert str(here.value) == str(there.value)


def test_closed_trainer_requests_no_step_of_its_workers(company, monkeypatch):
    run = company()
    run.trainer.run_step()
    run.close()
    monkeypatch.setattr(run.trainer._runner, "_attempt", lambda request: pytest.fail("requested"))
    with pytest.raises(ClusterError, match="connections to the run's processes are closed"):
        run.trainer.run_step()
