"""Shards of the store in processes of their own: the bits of one process, whoever is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config import Config
from penstock.errors import ConfigError, StorageError
from penstock.events import ClusterEvent, StepDone
from penstock.fabric.nodes.conductor import Phase
from penstock.metrics import read_metrics
from penstock.trainer import Trainer

# Wide enough for matrices to be cut between two shards.
MODEL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 300, "n_positions": 32}
APART = {"start": "local", "spare": 0, "shards": "apart"}
STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"line {i}: {'water ' * (i % 7)}" for i in range(600)))
    return path


def settings(text: Path, folder: Path, *, on_flash: bool = False, steps=STEPS, **changes) -> dict:
    store = {"shards": 2}
    if on_flash:
        store |= {"dram": "24MiB", "flash": {"path": str(folder / "flash")}}
    return {
        "model": {"preset": "gpt2", "overrides": {**MODEL, "resid_pdrop": 0.1}},
        "data": {"input": [str(text)], "path": str(folder.parent / "data")},
        "batch": {"size": 4, "micro": 1},
        "engine": {"threads": 1},
        "engines": 2,
        "evaluation": {"every": 3, "batches": 1},
        "optimizer": {"schedule": {"name": "constant"}},
        "run": {"dir": str(folder), "steps": steps},
        "store": store,
        "cluster": APART,
        **changes,
    }


class Run:
    """A run, and what was told of it."""

    def __init__(self, config: dict) -> None:
        self.losses: dict[int, float] = {}
        self.happened: list[ClusterEvent] = []
        self.also: Callable[[StepDone], None] = lambda step: None
        self.trainer = Trainer(config, on_event=self._hear)

    def _hear(self, event) -> None:
        if isinstance(event, ClusterEvent):
            self.happened.append(event)
        elif isinstance(event, StepDone):
            # A step that is made again has the bits of the first time.
            assert self.losses.setdefault(event.step, event.loss) == event.loss
            self.also(event)

    @property
    def hall(self):
        return self.trainer._runner.hall

    def pid_of_shard(self, shard: int) -> int:
        return self.hall.launcher.pids[self.hall.worker_of(self.hall.conductor.holders[shard][0])]

    def train(self) -> tuple[dict[int, float], str]:
        """Train to the end; return losses and the hash of the weights."""
        try:
            self.trainer.train()
            return self.losses, self.trainer.store.content_hash()
        finally:
            self.trainer.close()


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> tuple[dict[int, float], str]:
    """Losses and hash of one process, with one store in memory and one engine."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    found = Run(settings(text, folder, cluster={}, store={}, engines=1)).train()
    assert len(set(found[0].values())) == STEPS
    return found


def hash_of(folder: Path) -> str:
    result = CliRunner().invoke(app, ["inspect", str(folder), "--hash"])
    assert result.exit_code == 0, result.output
    return result.output.strip()


def test_a_run_in_memory_is_saved_and_goes_on_and_its_weights_do_not_pass_through_the_trainer(
    text, alone, tmp_path
):
    first = Run(settings(text, tmp_path / "run", steps=3, checkpoint={"every": 2}))
    program, carried = first.trainer.program, {}
    first.also = lambda event: carried.update({event.step: first.hall.carried_bytes})
    _, saved = first.train()
    # Between the first and the second step nothing is evaluated or saved: the batch's rows, and a
    # beat of every process ten times a second.
    streamed = sum(map(program.stage_stream_bytes, program.stages))
    assert 0 < carried[2] - carried[1] < streamed / 50
    assert hash_of(tmp_path / "run") == saved
    second = Run(settings(text, tmp_path / "run"))
    assert second.trainer.step == 3
    losses, weights = second.train()
    assert (first.losses | losses, weights) == alone
    assert hash_of(tmp_path / "run") == alone[1]


@pytest.mark.slow
def test_a_run_on_flash_goes_on_when_a_shard_is_killed(text, alone, tmp_path):
    run = Run(settings(text, tmp_path / "run", on_flash=True, steps=3))
    run.train()
    run = Run(settings(text, tmp_path / "run", on_flash=True))
    assert run.trainer.step == 3
    killed: list[int] = []

    def kill(shard: int) -> None:
        killed.append(run.pid_of_shard(shard))
        os.kill(killed[-1], signal.SIGKILL)

    def kill_in_a_step(shard: int) -> None:
        while run.hall.conductor.phase is not Phase.RUNNING:
            time.sleep(0.001)
        kill(shard)

    def after(step: StepDone) -> None:
        if step.step == 4 and not killed:  # between two steps
            kill(1)
        elif step.step == 5 and len(killed) == 1:
            threading.Thread(target=kill_in_a_step, args=(0,)).start()

    run.also = after
    assert run.train()[1] == alone[1]
    assert hash_of(tmp_path / "run") == alone[1]
    kinds = [event.kind for event in run.happened]
    assert kinds.count("shard lost") == kinds.count("shard joined") == 2
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [(row["step"], row["loss"]) for row in rows if row["event"] == "step"]
    assert steps == sorted(alone[0].items())  # each once, also those that were made again
    assert [row["text"] for row in rows if row.get("kind") == "shard lost"]
    for pid in killed:
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_shard_in_memory_that_is_killed_ends_the_run_and_says_how_to_go_on(text, alone, tmp_path):
    config = settings(text, tmp_path / "run", checkpoint={"every": 2})
    run = Run(config)
    for _ in range(2):
        run.trainer.run_step()
    run.trainer.save()
    began = time.monotonic()
    os.kill(run.pid_of_shard(1), signal.SIGKILL)
    told = r"shard 1 of the store was lost.*the same command again"
    with pytest.raises(StorageError, match=told):
        run.trainer.run_step()
    assert time.monotonic() - began < 5
    run.trainer.close()
    again = Run(config)
    assert again.trainer.step == 2
    losses, weights = again.train()
    assert ({**run.losses, **losses}, weights) == alone


def test_shards_apart_need_processes():
    with pytest.raises(
        ConfigError, match=r"cluster\.shards: expected here with cluster\.start: no"
    ):
        Config.from_mapping({"model": "gpt2", "cluster": {"shards": "apart"}})
