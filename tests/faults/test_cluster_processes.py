"""Real processes, killed, stopped, added and taken away: the run goes on to the same bits."""

from __future__ import annotations

import os
import random
import re
import signal
import stat
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from test_forks import is_running
from waiting import wait_until

from penstock.cli import main
from penstock.telemetry.events import ClusterEvent, StepDone
from penstock.training.trainer import Trainer

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
        return list(self.trainer._runner.manager.launcher.pids.values())

    def pid_of(self, place: int) -> int:
        """The process of the engine at a place of the present view."""
        manager = self.trainer._runner.manager
        node = manager.coordinator.engines[place]
        return manager.launcher.pids[manager.registry.find(node).worker]

    def engines(self) -> int:
        return len(self.trainer._runner.manager.coordinator.engines)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.trainer.run_step()

    def why_lost(self, begin: float) -> str:
        """Why the first engine since then was lost."""
        return next(e.text for at, e in self.happened if at > begin and e.kind == "engine lost")

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


def alone(text: Path, folder: Path, steps: int, **changes) -> tuple[list[float], str]:
    """The losses and the hash of the weights of one engine in one process."""
    trainer = Trainer(settings(text, folder, **changes))
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


@pytest.mark.long
def test_losses_and_scaling_do_not_change_bits(text, tmp_path, monkeypatch, capsys):
    run = watched(settings(text, tmp_path / "many", engines=3, cluster={"start": "local"}))
    try:
        run.train(2)
        assert run.engines() == 3

        # Killed in the middle of a step: noticed by its connection and no lease, and the spare
        # engine takes its place. (How soon, is measured by the slow tests below.)
        # What workers are forked from is killed too: the next one is started from nothing.
        os.kill(run.trainer._runner.manager.launcher.fork_server.pid, signal.SIGKILL)
        begin = time.monotonic()
        os.kill(run.pid_of(1), signal.SIGKILL)
        run.train(2)
        assert "its connection ended" in run.why_lost(begin)
        assert run.engines() == 3

        # Two at once, one of them standing still: what is left goes on when the lease is over.
        # The one that was killed is replaced.
        wait_until(lambda: len(run.trainer._runner.manager.coordinator.ready) == 4)
        begin = time.monotonic()
        os.kill(run.pid_of(0), signal.SIGSTOP)
        run.train(1)
        silent = re.search(r"silent for ([\d.]+) s", run.why_lost(begin))
        assert silent is not None
        assert float(silent[1]) >= LEASE

        # Fewer, one, and more than before, three of eight not being a power of two.
        record = tmp_path / "many" / "cluster.json"
        assert stat.S_IMODE(record.stat().st_mode) == 0o600
        for wanted in (1, 2):
            run.trainer._runner.manager.scale(wanted)
            run.train(2)
            assert run.engines() == wanted
        capsys.readouterr()
        assert penstock(monkeypatch, "scale", str(record.parent), "engines=4") == 0
        assert "2 engines now, 4 from the next step" in capsys.readouterr().out
        assert penstock(monkeypatch, "scale", str(record.parent)) == 0
        told = capsys.readouterr().out
        assert ": 4 engines wanted, " in told
        assert " ready; to change: penstock scale " in told
        run.train(1)
        assert penstock(monkeypatch, "scale", str(record.parent), "engines=9") == 2
        error = "expected 1 to 8"
        assert error in capsys.readouterr().err
        lines = [event.text for _, event in run.happened]
        assert all("\n" not in line for line in lines)
        scaled = [event.engines for _, event in run.happened if event.kind == "scaled"]
        assert scaled == [1, 2, 4]  # by which the command that resumes the run is named
        losses = [event.loss for _, event in run.steps]
        weights = run.trainer.store.content_hash()
        processes = run.pids
    finally:
        run.trainer.close()
    assert (losses, weights) == alone(text, tmp_path / "one", len(losses))
    assert len(losses) == 10
    for pid in processes:  # none is left behind
        wait_until(lambda pid=pid: not is_running(pid), f"process {pid} ends")
    assert not (tmp_path / "many" / "cluster.json").exists()


# What holds of every blow, in seconds. The machine may be busy with other things: of 25 blows one
# may take longer, and none more than three times as long.
NOTICED = {"kill": 1.0, "stop": LEASE + 0.5}
RESUMED, WHOLE = 1.0, 5.0


@dataclass
class Blows:
    """How long the blows of one kind took to be noticed, got over and made good."""

    noticed: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)  # from then to the next step
    whole: list[float] = field(default_factory=list)  # from then until all are there again

    def require(self, blow: str) -> None:
        for name, found, bound in (
            ("noticed", self.noticed, NOTICED[blow]),
            ("resumed", self.resumed, RESUMED),
            ("whole", self.whole, WHOLE),
        ):
            late = sorted(seconds for seconds in found if seconds > bound)
            said = f"{len(late)} of {len(found)} x {blow}: {name} after {late} s, not {bound}; "
            said += f"the machine's load is {os.getloadavg()}"
            assert len(late) <= max(1, len(found) // 25), said
            assert not late or late[-1] <= 3 * bound, said


def strike(
    run: Watched,
    chance: random.Random,
    blows: list[str],
    choose: Callable[[], int],
    await_whole: Callable[[], None],
) -> dict[str, Blows]:
    """Kill or stop the process that is chosen at a random moment, once for each of the blows.

    How long each kind took is printed.
    """
    found = {blow: Blows() for blow in sorted(set(blows))}
    lost = ("engine lost", "replica lost")
    await_whole()
    for blow in blows:
        pid, hit = choose(), []

        def act(pid=pid, blow=blow, hit=hit) -> None:
            hit.append(time.monotonic())
            os.kill(pid, signal.SIGKILL if blow == "kill" else signal.SIGSTOP)

        timer = threading.Timer(chance.uniform(0, 0.1), act)
        timer.start()
        while not any(hit and at > hit[0] and event.kind in lost for at, event in run.happened):
            run.train(1)
        run.train(1)
        timer.join()
        lost_at = next(at for at, event in run.happened if at > hit[0] and event.kind in lost)
        found[blow].noticed.append(lost_at - hit[0])
        found[blow].resumed.append(run.seconds_until_step(lost_at))
        await_whole()
        found[blow].whole.append(time.monotonic() - lost_at)
    for blow, seconds in found.items():
        print(f"{len(seconds.noticed)} x {blow}:")
        for name, some in vars(seconds).items():
            print(f"  {name} after {statistics.median(some):.3f} s (most {max(some):.3f})")
    return found


def mixed(chance: random.Random, kills: int, stops: int) -> list[str]:
    blows = ["kill"] * kills + ["stop"] * stops
    chance.shuffle(blows)
    return blows


@pytest.mark.slow
def test_fifty_random_kills_and_twenty_stops_do_not_change_bits(text, tmp_path):
    """Every blow to an engine is noticed, got over and made good in its time."""
    chance = random.Random(0)
    run = watched(settings(text, tmp_path / "many", engines=3, cluster={"start": "local"}))
    coordinator = run.trainer._runner.manager.coordinator

    def await_whole() -> None:
        while len(coordinator.ready) < 4:
            time.sleep(0.01)  # steps would only add up

    try:
        run.train(1)
        blows = mixed(chance, 50, 20)
        found = strike(run, chance, blows, lambda: run.pid_of(chance.randrange(3)), await_whole)
        losses = [event.loss for _, event in run.steps]
        weights = run.trainer.store.content_hash()
    finally:
        run.trainer.close()
    assert (losses, weights) == alone(text, tmp_path / "one", len(losses))
    for blow, seconds in found.items():
        seconds.require(blow)


@pytest.mark.slow
def test_kills_and_stops_of_engines_and_replicated_shards(text, tmp_path):
    """Any process of the run is struck: the other node of a shard goes on with it at once."""
    chance = random.Random(1)
    cluster = {"start": "local", "shards": "apart"}
    store = {"shards": 2, "replicas": 2}
    run = watched(settings(text, tmp_path / "many", engines=2, cluster=cluster, store=store))
    manager = run.trainer._runner.manager

    def choose() -> int:
        nodes = [
            *manager.coordinator.engines,
            *(n for some in manager.coordinator.holders for n in some),
        ]
        return manager.launcher.pids[manager.registry.find(chance.choice(nodes)).worker]

    def await_whole() -> None:
        coordinator = manager.coordinator
        while len(coordinator.ready) < 3 or any(len(some) < 2 for some in coordinator.holders):
            manager.event_queue.poll()
            if manager._assignment.learners:
                run.train(1)  # it gets its copy between two steps
            time.sleep(0.01)

    try:
        run.train(1)
        found = strike(run, chance, mixed(chance, 25, 5), choose, await_whole)
        kinds = {event.kind for _, event in run.happened}
        assert {"engine lost", "replica lost"} <= kinds
        assert not kinds & {"shard lost", "went back"}
        losses = [event.loss for _, event in run.steps]
        weights = run.trainer.store.content_hash()
    finally:
        run.trainer.close()
    assert (losses, weights) == alone(text, tmp_path / "one", len(losses))
    for blow, seconds in found.items():
        seconds.require(blow)
