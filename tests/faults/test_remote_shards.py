"""Shards of the store in processes of their own: the bits of one process, whoever is killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner
from waiting import wait_until

from penstock.cli.app import app
from penstock.config import Config
from penstock.distributed.protocol.coordinator import Phase
from penstock.errors import ConfigError, StorageError
from penstock.telemetry.events import ClusterEvent, StepDone
from penstock.telemetry.metrics_writer import read_metrics
from penstock.training.trainer import Trainer

# Wide enough for matrices to be cut between two shards.
MODEL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 300, "n_positions": 32}
APART = {"start": "local", "spare": 0, "shards": "apart"}
STEPS = 6
COPY_POINT = "copy.begun"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"line {i}: {'water ' * (i % 7)}" for i in range(600)))
    return path


def settings(
    text: Path,
    folder: Path,
    *,
    on_flash: bool = False,
    steps=STEPS,
    shards=2,
    replicas=1,
    **changes,
) -> dict:
    store = {"shards": shards, "replicas": replicas}
    if on_flash:
        store |= {"dram": f"{24 * replicas}MiB", "flash": {"path": str(folder / "flash")}}
    return {
        "model": {"preset": "gpt2", "overrides": {**MODEL, "resid_pdrop": 0.1}},
        "data": {"input": [str(text)], "path": str(folder.parent / "data")},
        "batch": {"size": 4, "micro": 1},
        "engine": {"threads": 1},
        "engines": 1,
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
        self.begun: list[int] = []  # the learners whose copies were begun
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
    def manager(self):
        return self.trainer._runner.manager

    def pid_of_shard(self, shard: int, place: int = 0) -> int:
        """The process of a node that holds a shard: of the first, which streams, or another."""
        node = self.manager.coordinator.holders[shard][place]
        return self.manager.launcher.pids[self.manager.registry.find(node).worker]

    def kill(self, shard: int, place: int = 0) -> int:
        pid = self.pid_of_shard(shard, place)
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_in_a_step(
        self, shard: int, place: int = 0, then: Callable[[], None] = lambda: None
    ) -> None:
        """End a process while gradients are on their way, from a thread of its own."""

        def act() -> None:
            while self.manager.coordinator.phase is not Phase.RUNNING:
                time.sleep(0.001)
            self.kill(shard, place)
            then()

        threading.Thread(target=act, daemon=True).start()

    def await_learner(self) -> None:
        """Wait for who comes in place of one that was lost; the next step gives it a copy."""

        def has_come() -> bool:
            self.manager.event_queue.poll()
            return bool(self.manager._assignment.learners)

        wait_until(has_come)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.happened]

    def train(self) -> tuple[dict[int, float], str]:
        """Train to the end; return losses and the hash of the weights."""
        try:
            self.trainer.train()
            return self.losses, self.trainer.store.content_hash()
        finally:
            self.trainer.close()


@pytest.mark.long
def test_spans_of_all_processes_are_collected_when_they_are_asked_for(text, tmp_path):
    run = Run(settings(text, tmp_path / "run", steps=2))
    runner, found = run.trainer._runner, []
    runner._spans.keep = 1000
    run.also = lambda step: found.append(runner.measured)
    run.train()
    operations = run.trainer._layout.schedule_of(1).operations
    collector = runner.manager.span_collector
    for number, measured in enumerate(found, 1):
        own, lanes = {}, set()
        for span in measured.spans:
            own.setdefault((span.lane, span.what), []).append(span)
            lanes.add(span.lane)
        ((step,),) = [spans for key, spans in own.items() if key == ("trainer", "step")]
        (engine,) = [lane for lane in lanes if lane.endswith(": compute")]
        computed = [each for key, spans in own.items() if key[0] == engine for each in spans]
        computed = [each for each in computed if each.op is not None]
        assert sorted(each.op for each in computed) == [each.number for each in operations]
        assert {each.step for each in computed} == {number}
        for shard in (1, 2):
            fetched = own[f"{shard}: store", "fetch"]
            assert [each.op for each in fetched] == [each.number for each in operations]
            assert len(own[f"{shard}: store", "commit"]) == 1
        error = max(min(each)[0] for each in collector._estimates.values())
        for each in computed:
            assert step.begin - error <= each.begin <= each.end <= step.end + error
        assert measured.dropped == 0
    # The updates of the first step are made in the second.
    assert any(span.lane.endswith(": update") for span in found[1].spans)


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> tuple[dict[int, float], str]:
    """Losses and hash of one process, with one store in memory and one engine."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    found = Run(settings(text, folder, cluster={}, store={}, engines=1)).train()
    assert len(set(found[0].values())) == STEPS
    return found


def hash_of(folder: Path) -> str:
    return said_by("inspect", str(folder), "--hash")


def said_by(*command: str) -> str:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.output.strip()


def shared_bytes(run: Run) -> int:
    """What the trainer's process has sent through memory that another process sees too."""
    return sum(member.connection.shared_bytes for member in run.manager.registry.members)


@pytest.mark.long
def test_run_in_memory_resumes_and_weights_bypass_trainer(text, alone, tmp_path, monkeypatch):
    for module in ("shared_memory", "connection"):  # the model is small
        monkeypatch.setattr(f"penstock.distributed.transport.{module}.LEAST_BYTES", 1 << 10)
    first = Run(settings(text, tmp_path / "run", steps=3, checkpoint={"every": 2}))
    program, carried = first.trainer.program, {}
    first.also = lambda event: carried.update({event.step: first.manager.registry.carried_bytes})
    _, saved = first.train()
    # Between the first and the second step nothing is evaluated or saved: the batch's rows, and a
    # beat of every process ten times a second.
    streamed = sum(map(program.stage_stream_bytes, program.stages))
    assert 0 < carried[2] - carried[1] < streamed / 50
    assert hash_of(tmp_path / "run") == saved
    assert shared_bytes(first) > 0
    # Over sockets alone, as between hosts, it goes on to the same bits.
    cluster = {**APART, "shared_memory": "off"}
    second = Run(settings(text, tmp_path / "run", cluster=cluster))
    assert second.trainer.step == 3
    losses, weights = second.train()
    assert shared_bytes(second) == 0
    assert (first.losses | losses, weights) == alone
    assert hash_of(tmp_path / "run") == alone[1]
    assert said_by("generate", str(tmp_path / "run"), "--max-new-tokens", "2")
    assert hash_of(tmp_path / "run") == alone[1]


@pytest.mark.long
def test_shard_in_memory_is_rebuilt_from_replica(text, alone, tmp_path):
    """The one that streams is killed in a step; then, when the learner is whole, the other one."""
    run = Run(settings(text, tmp_path / "run", shards=1, replicas=2))
    killed: list[int] = []

    def after(step: StepDone) -> None:
        if step.step == 2:
            killed.append(run.pid_of_shard(0))
            run.kill_in_a_step(0)
        elif step.step == 3:
            run.await_learner()
        elif step.step == 4:
            assert "replica copied" in run.kinds
            killed.append(run.kill(0))  # all that is left then has come as a copy

    run.also = after
    assert run.train() == alone
    assert run.kinds.count("replica lost") == len({*killed}) == 2
    assert not {*run.kinds} & {"shard lost", "went back"}
    assert hash_of(tmp_path / "run") == alone[1]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["event"] == "step"] == list(range(1, STEPS + 1))
    told = [row["text"] for row in rows if row.get("kind") in ("replica lost", "replica copied")]
    assert "the shard continues on node" in told[0]
    assert "is a replica now" in told[1]


def once_a_copy_begins(run: Run, monkeypatch, act: Callable[[int, int], None]) -> None:
    """Do something when the first copy has just been begun, with whose it is and the learner."""
    calls, begun = run.manager._calls, run.begun
    begin = calls.begin

    def watching(node, method, arguments, *others, **more):
        asked = begin(node, method, arguments, *others, **more)
        if method == "take_copy":
            begun.append(node)
            if len(begun) == 1:
                act(arguments["source"], node)
        return asked

    monkeypatch.setattr(calls, "begin", watching)


def signal_to(run: Run, node: int, what: signal.Signals) -> None:
    os.kill(run.manager.launcher.pids[run.manager.registry.find(node).worker], what)


@pytest.mark.slow
def test_learner_killed_during_copy_is_replaced(text, alone, tmp_path, monkeypatch):
    run = Run(settings(text, tmp_path / "run", shards=1, replicas=2))

    def after(step: StepDone) -> None:
        if step.step == 1:
            once_a_copy_begins(
                run, monkeypatch, lambda source, node: signal_to(run, node, signal.SIGKILL)
            )
            run.kill(0)
        elif step.step in (2, 4):
            run.await_learner()

    run.also = after
    assert run.train() == alone
    assert len({*run.begun}) == 2
    assert run.kinds.count("replica copied") == 1
    assert not {*run.kinds} & {"shard lost", "went back"}


@pytest.mark.slow
@pytest.mark.parametrize("on_flash", [False, True])
@pytest.mark.usefixtures("speculated")
def test_source_lost_during_copy(text, alone, tmp_path, monkeypatch, on_flash):
    """On flash another opens what it had and is copied; in memory the run ends and says so."""
    run = Run(settings(text, tmp_path / "run", shards=1, replicas=2, on_flash=on_flash))

    def after(step: StepDone) -> None:
        if step.step == 1 and not run.kinds.count("replica lost"):
            once_a_copy_begins(
                run, monkeypatch, lambda source, node: signal_to(run, source, signal.SIGSTOP)
            )
            run.kill(0)
        elif step.step == 2 and not run.begun:
            run.await_learner()

    run.also = after
    if on_flash:
        assert run.train() == alone
        assert len(run.begun) >= 2
        assert run.kinds.count("replica copied") >= 1
    else:
        with pytest.raises(StorageError, match="resumes from the last checkpoint"):
            run.train()
    assert "shard lost" in run.kinds


@pytest.mark.slow
def test_trainer_killed_during_copy_restarts_copy(text, alone, tmp_path):
    config = settings(text, tmp_path / "run", shards=1, replicas=2, on_flash=True)
    first = Run({**config, "run": {"dir": str(tmp_path / "run"), "steps": 3}})
    first.train()
    shutil.rmtree(tmp_path / "run" / "flash" / "shard-0-replica-1")
    code = "import sys, json; from penstock import Trainer; Trainer(json.load(sys.stdin))"
    killed = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(config),
        text=True,
        env={**os.environ, "PENSTOCK_FAULT": COPY_POINT},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    again = Run(config)
    losses, weights = again.train()
    assert (first.losses | losses, weights) == alone
    assert "replica copied" in again.kinds


@pytest.mark.slow
@pytest.mark.parametrize("on_flash", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.usefixtures("speculated")
def test_random_kills_of_replicated_shards_do_not_change_bits(text, tmp_path, on_flash, seed):
    """Either process of either shard, between steps or within one, as often as they come back."""
    steps, chance = 36, random.Random(seed)
    one = settings(text, tmp_path / "one" / "run", cluster={}, store={}, steps=steps)
    expected = Run(one).train()
    folder = tmp_path / "two" / "run"
    run = Run(settings(text, folder, steps=steps, replicas=2, engines=2, on_flash=on_flash))
    kills = 0

    def after(step: StepDone) -> None:
        nonlocal kills
        if step.step % 6 == 0:
            shard = chance.randrange(2)
            if len(run.manager.coordinator.holders[shard]) == 2:
                kills += 1
                (run.kill if chance.random() < 0.5 else run.kill_in_a_step)(
                    shard, chance.randrange(2)
                )
        elif step.step % 6 == 4 and run.manager._assignment.free([]):
            run.await_learner()

    run.also = after
    assert run.train() == expected
    assert kills >= 4
    assert run.kinds.count("replica lost") >= 4
    assert run.kinds.count("replica copied") >= 3
    assert not {*run.kinds} & {"shard lost", "went back"}
    assert hash_of(folder) == expected[1]


@pytest.mark.slow
@pytest.mark.usefixtures("speculated")
def test_both_replicas_on_flash_killed_resume_newest_step(text, alone, tmp_path):
    config = settings(text, tmp_path / "run", on_flash=True, replicas=2)
    run = Run(config)
    killed: list[int] = []

    def after(step: StepDone) -> None:
        if step.step == 2 and not killed:  # it is made again
            killed.extend(run.pid_of_shard(1, place) for place in range(2))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        elif step.step == 4 and "replica lost" in run.kinds:
            run.kill(0, 0)  # whose folder is behind then
            run.trainer.request_stop()

    run.also = after
    run.train()
    assert "shard lost" in run.kinds
    again = Run(config)
    losses, weights = again.train()
    assert ({**run.losses, **losses}, weights) == alone
    assert said_by("eval", str(tmp_path / "run"), "--batches", "1").startswith(f"step {STEPS}  ")
    assert hash_of(tmp_path / "run") == alone[1]


@pytest.mark.slow
@pytest.mark.parametrize("in_a_step", [False, True])
def test_stop_during_lost_shard_can_be_resumed(text, alone, tmp_path, in_a_step):
    config = settings(text, tmp_path / "run", on_flash=True)
    run = Run(config)

    def after(step: StepDone) -> None:
        if step.step == 3 and in_a_step:
            run.kill_in_a_step(1, then=run.trainer.request_stop)
        elif step.step == 3:
            run.kill(1)
            run.trainer.request_stop()

    run.also = after
    told = "shard.* lost; give the same command again; the run resumes from the last saved step"
    with pytest.raises(StorageError, match=told):
        run.train()
    again = Run(config)
    losses, weights = again.train()
    assert ({**run.losses, **losses}, weights) == alone


@pytest.mark.slow
@pytest.mark.usefixtures("speculated")
def test_killed_shard_on_flash_is_reopened(text, alone, tmp_path):
    run = Run(settings(text, tmp_path / "run", on_flash=True, steps=3, engines=2))
    run.train()
    run = Run(settings(text, tmp_path / "run", on_flash=True, engines=2))
    assert run.trainer.step == 3
    killed: list[int] = []

    def after(step: StepDone) -> None:
        if step.step == 4 and not killed:  # between two steps
            killed.append(run.kill(1))
        elif step.step == 5 and len(killed) == 1:
            killed.append(run.pid_of_shard(0))
            run.kill_in_a_step(0)

    run.also = after
    assert run.train()[1] == alone[1]
    assert hash_of(tmp_path / "run") == alone[1]
    assert run.kinds.count("shard lost") == run.kinds.count("shard joined") == 2
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [(row["step"], row["loss"]) for row in rows if row["event"] == "step"]
    assert steps == sorted(alone[0].items())  # each once, also those that were made again
    assert [row["text"] for row in rows if row.get("kind") == "shard lost"]
    for pid in killed:
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())


@pytest.mark.slow
def test_killed_shard_in_memory_ends_run(text, alone, tmp_path):
    config = settings(text, tmp_path / "run", checkpoint={"every": 2})
    run = Run(config)
    for _ in range(2):
        run.trainer.run_step()
    run.trainer.save()
    run.kill(1)
    told = r"shard 1 of the store was lost.*the same command again"
    with pytest.raises(StorageError, match=told):
        run.trainer.run_step()
    assert any("its connection ended" in event.text for event in run.happened)  # and no lease
    run.trainer.close()
    again = Run(config)
    assert again.trainer.step == 2
    losses, weights = again.train()
    assert ({**run.losses, **losses}, weights) == alone


def test_shard_processes_need_cluster_start():
    with pytest.raises(
        ConfigError, match=r"cluster\.shards: expected here, got apart: cluster\.start is none"
    ):
        Config.from_mapping({"model": "gpt2", "cluster": {"shards": "apart"}})
