"""Engines as actors of a Ray cluster that is started for the run: the bits of one engine, a killed
actor replaced, nobody let in without Ray's token, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from waiting import wait_until

from penstock.telemetry.events import ClusterEvent
from penstock.training.trainer import Trainer

MODEL = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 300, "n_positions": 32}


def settings(folder: Path, name: str, **changes) -> dict:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("\n".join(f"line {i}: {'water ' * (i % 7)}" for i in range(600)))
    return {
        "model": {"preset": "gpt2", "overrides": {**MODEL, "resid_pdrop": 0.1}},
        "data": {"input": [str(text)], "path": str(folder / "data")},
        "batch": {"size": 4, "micro": 1},
        "engine": {"threads": 1},
        "run": {"dir": str(folder / name), "steps": 100},
        **changes,
    }


class Watched:
    """A run on Ray, and what happened in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.happened = folder, []
        # A lease that no busy machine exceeds: what is tested here is noticed without it.
        cluster = {"start": "ray", "spare": 0, "lease": 30.0, "stall": 30.0}
        self.trainer = Trainer(
            settings(folder, "ray", engines=2, cluster=cluster, fabric={"relays": 1}),
            on_event=lambda e: self.happened.append(e) if isinstance(e, ClusterEvent) else None,
        )
        self.losses: list[float] = []

    @property
    def manager(self):
        return self.trainer._runner.manager

    def engines(self) -> tuple[int, ...]:
        return self.manager.coordinator.engines

    def relays(self) -> tuple[int, ...]:
        return self.manager.coordinator._epochs.view.relays

    def train(self, steps: int) -> None:
        self.losses += [self.trainer.run_step().loss for _ in range(steps)]

    def await_engines(self, number: int) -> None:
        wait_until(lambda: len(self.manager.coordinator.ready) >= number, self.happened, 400)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Watched]:
    watched = Watched(tmp_path_factory.mktemp("ray"))
    yield watched
    watched.trainer.close()


@pytest.mark.long
def test_ray_engines_and_relay_with_one_of_each_killed_give_bits_of_one_engine(run):
    run.train(1)
    run.await_engines(2)  # on a busy machine the run starts with the first
    run.train(1)
    engines = run.engines()
    actors = run.manager.launcher.pids
    assert len(engines) == 2
    assert len(actors) == 3  # and a relay
    killed = run.manager.registry.find(engines[1]).worker
    os.kill(actors[killed], signal.SIGKILL)
    run.train(2)
    assert run.manager.event_queue.counts["engine lost"] == 1
    run.await_engines(2)  # one more was started
    run.train(1)
    assert len(run.engines()) == 2
    assert set(run.engines()) - set(engines)
    how = [event.text for event in run.happened if event.kind == "worker ended"]
    assert len(how) == 1
    assert how[0].startswith(f"{killed} on {os.uname().nodename} with pid {actors[killed]} ended")
    assert killed not in run.manager.launcher.pids

    [relay] = run.relays()
    os.kill(run.manager.launcher.pids[run.manager.registry.find(relay).worker], signal.SIGKILL)
    run.train(1)
    assert run.manager.event_queue.counts["relay lost"] == 1
    wait_until(lambda: run.manager.coordinator.membership.relays, run.happened, 400)
    run.train(1)
    assert len(run.relays()) == 1
    assert run.relays() != (relay,)

    alone = Trainer(settings(run.folder, "alone"))
    losses = [alone.run_step().loss for _ in run.losses]
    assert run.losses == losses
    assert run.trainer.store.content_hash() == alone.store.content_hash()
    alone.close()


CLIENT = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
print("in", len(ray.nodes()))
"""


def client(address: str, home: Path, token: str | None) -> str:
    """What a process meets that would join the cluster: `in`, or the reason of a refusal."""
    environment = {key: value for key, value in os.environ.items() if "RAY_" not in key}
    environment |= {"HOME": str(home), "PYTHONWARNINGS": "ignore"}
    if token is not None:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, address],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen = []
    try:
        for line in process.stdout:  # Ray tries again for 20 s; its first word is enough
            seen.append(line)
            if line.startswith("in ") or "Unauthenticated" in line:
                return line
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    return "".join(seen)


@pytest.mark.long
def test_ray_refuses_clients_without_token(run, tmp_path):
    address, token = ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"]
    assert client(address, tmp_path, token) == "in 1\n"
    assert "Unauthenticated" in client(address, tmp_path, None)
    assert "Unauthenticated" in client(address, tmp_path, token[::-1])


@pytest.mark.long
def test_closed_run_leaves_no_ray_processes(run):
    session = ray._private.worker._global_node.get_session_dir_path()
    run.trainer.close()
    assert not ray.is_initialized()

    def left() -> list[str]:
        lines = Path("/proc").glob("[0-9]*/cmdline")
        return [path.parent.name for path in lines if session in _text(path)]

    wait_until(lambda: not left())
    assert not (run.folder / "ray" / "cluster.json").exists()


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
