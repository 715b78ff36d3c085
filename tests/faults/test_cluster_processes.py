"""Real processes, killed, stopped, added and taken away: the run goes on to the same bits."""

from __future__ import annotations

import os
import random
import signal
import stat
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_forks import is_running

from penstock.cli import main
from penstock.events import ClusterEvent, StepDone
from penstock.trainer import Trainer

MODEL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 300, "n_positions": 32}
MICRO_BATCHES = 8
LEASE = 1.0


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(f"line {i}: {'water ' * (i % 7)}" for i in range(600)))
    return path


def settings(text: Path, folder: Path, **changes) -> dict:
    return {
        # With dropout, so that a micro-batch that is computed elsewhere must draw the same.
        "model": {"preset": "gpt2", "overrides": {**MODEL, "resid_pdrop": 0.1}},
        "data": {"input": [str(text)], "path": str(folder.parent / "data")},
        "batch": {"size": MICRO_BATCHES, "micro": 1},
        "engine": {"threads": 1},
        "run": {"dir": str(folder), "steps": 100_000},
        **changes,
    }


@dataclass
class Watched:
    """A run, and when what happened in it."""

    trainer: Trainer
    happened: list[tuple[float, ClusterEvent]] = field(default_factory=list)
    steps: list[tuple[float, StepDone]] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return list(self.trainer._runner.hall.launcher.pids.values())

    def pid_of(self, place: int) -> int:
        """The process of the engine at a place of the present view."""
        hall = self.trainer._runner.hall
        return hall.launcher.pids[hall.worker_of(hall.conductor.engines[place])]

    def engines(self) -> int:
        return len(self.trainer._runner.hall.conductor.engines)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.run_step()

    def seconds_until(self, kind: str, begin: float) -> float:
        return next(at for at, event in self.happened if at > begin and event.kind == kind) - begin

    def seconds_until_step(self, begin: float) -> float:
        return next(at for at, _ in self.steps if at > begin) - begin


def watched(config: dict) -> Watched:
    run = Watched(trainer=None)  # type: ignore[arg-type]

    def hear(event) -> None:
        if isinstance(event, ClusterEvent):
            run.happened.append((time.monotonic(), event))
        elif isinstance(event, StepDone):
            run.steps.append((time.monotonic(), event))

    run.trainer = Trainer(config, on_event=hear)
    return run


def alone(text: Path, folder: Path, steps: int) -> tuple[list[float], str]:
    """The losses and the hash of the weights of one engine in one process."""
    trainer = Trainer(settings(text, folder))
    try:
        losses = [trainer.run_step().loss for _ in range(steps)]
        return losses, trainer.store.content_hash()
    finally:
        trainer.close()


def penstock(monkeypatch, *arguments: str) -> int:
    """Type a command; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_a_run_goes_on_through_losses_and_changes_to_the_same_bits(
    text, tmp_path, monkeypatch, capsys
):
    run = watched(settings(text, tmp_path / "many", engines=3, cluster={"start": "local"}))
    try:
        run.train(2)
        assert run.engines() == 3

        # Killed in the middle of a step: noticed at once, and the spare engine takes its place.
        # What workers are forked from is killed too: the next one is started from nothing.
        os.kill(run.trainer._runner.hall.launcher.template.pid, signal.SIGKILL)
        begin = time.monotonic()
        os.kill(run.pid_of(1), signal.SIGKILL)
        run.train(2)
        assert run.seconds_until("engine lost", begin) < 1.0
        assert run.seconds_until_step(begin) < 5.0
        assert run.engines() == 3

        # Two at once, one of them standing still: what is left goes on when the lease is over.
        while len(run.trainer._runner.hall.conductor.ready) < 4:
            time.sleep(0.05)  # until the one that was killed is replaced
        begin = time.monotonic()
        os.kill(run.pid_of(0), signal.SIGSTOP)
        run.train(1)
        # Counted from its last word, which may be some beats old.
        assert LEASE - 0.5 < run.seconds_until("engine lost", begin) < LEASE + 2.0
        assert run.seconds_until_step(begin) < LEASE + 5.0

        # Fewer, one, and more than before, three of eight not being a power of two.
        record = tmp_path / "many" / "cluster.json"
        assert stat.S_IMODE(record.stat().st_mode) == 0o600
        for wanted in (1, 2):
            run.trainer._runner.hall.scale(wanted)
            run.train(2)
            assert run.engines() == wanted
        capsys.readouterr()
        assert penstock(monkeypatch, "scale", str(record.parent), "engines=4") == 0
        assert "2 engines before, 4 from the next step on" in capsys.readouterr().out
        run.train(1)
        assert penstock(monkeypatch, "scale", str(record.parent), "engines=9") == 2
        error = "expected 1 (with fewer, a step does not fit engine.memory) to 8"
        assert error in capsys.readouterr().err
        lines = [event.text for _, event in run.happened]
        assert all("\n" not in line for line in lines)
        losses = [event.loss for _, event in run.steps]
        weights = run.trainer.store.content_hash()
        processes = run.pids
    finally:
        run.trainer.close()
    assert (losses, weights) == alone(text, tmp_path / "one", len(losses))
    assert len(losses) == 10
    for pid in processes:  # none is left behind
        deadline = time.monotonic() + 10
        while is_running(pid):
            assert time.monotonic() < deadline, pid
            time.sleep(0.05)
    assert not (tmp_path / "many" / "cluster.json").exists()


@pytest.mark.slow
def test_fifty_kills_and_twenty_stops_at_random_moments(text, tmp_path):
    """How long each takes to be noticed, and to be made good, is printed at the end."""
    chance = random.Random(0)
    run = watched(settings(text, tmp_path / "many", engines=3, cluster={"start": "local"}))
    noticed: dict[str, list[float]] = {"kill": [], "stop": []}
    resumed: dict[str, list[float]] = {"kill": [], "stop": []}
    whole: dict[str, list[float]] = {"kill": [], "stop": []}
    blows = ["kill"] * 50 + ["stop"] * 20
    chance.shuffle(blows)
    try:
        run.train(1)
        while len(run.trainer._runner.hall.conductor.ready) < 4:
            time.sleep(0.01)
        for blow in blows:
            pid = run.pid_of(chance.randrange(3))
            hit: list[float] = []

            def strike(pid=pid, blow=blow, hit=hit) -> None:
                hit.append(time.monotonic())
                os.kill(pid, signal.SIGKILL if blow == "kill" else signal.SIGSTOP)

            timer = threading.Timer(chance.uniform(0, 0.1), strike)
            timer.start()
            while not any(
                hit and at > hit[0] and event.kind == "engine lost" for at, event in run.happened
            ):
                run.train(1)
            run.train(1)
            timer.join()
            noticed[blow].append(run.seconds_until("engine lost", hit[0]))
            lost_at = hit[0] + noticed[blow][-1]
            resumed[blow].append(run.seconds_until_step(lost_at))
            while len(run.trainer._runner.hall.conductor.ready) < 4:
                time.sleep(0.01)  # until it is replaced; steps would only add up
            whole[blow].append(time.monotonic() - lost_at)
        losses = [event.loss for _, event in run.steps]
        weights = run.trainer.store.content_hash()
    finally:
        run.trainer.close()
    for blow, seconds in noticed.items():
        print(
            f"{len(seconds)} x {blow}: noticed after {statistics.median(seconds):.3f} s (most "
            f"{max(seconds):.3f}), the next step was there {statistics.median(resumed[blow]):.3f} "
            f"s later (most {max(resumed[blow]):.3f}), all four engines were there again "
            f"{statistics.median(whole[blow]):.3f} s later (most {max(whole[blow]):.3f})"
        )
    assert (losses, weights) == alone(text, tmp_path / "one", len(losses))
    assert statistics.median(noticed["kill"]) < 1.0
    assert statistics.median(noticed["stop"]) < LEASE + 0.5
    assert statistics.median(resumed["kill"]) < 1.0
    assert statistics.median([*whole["kill"], *whole["stop"]]) < 5.0
