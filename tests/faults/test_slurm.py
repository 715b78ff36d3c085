"""The recipe for SLURM, on a SLURM of this machine's: jobs that train on several nodes, are told to
stop, are cancelled, lose nodes and go on, to the bits of one process.

Needs root, and `apt-get install slurm-wlm munge`. It makes a cluster of its own and ends it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from slurm_cluster import Slurm, why_not
from whole_hosts import Host, whole_hosts

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes/slurm/ray.sbatch")
PENSTOCK = f"""#!/usr/bin/env bash
exec {sys.executable} -c 'from penstock.cli import main; main()' "$@"
"""
RUN = {
    "model": {
        "preset": "gpt2",
        "overrides": {
            "n_layer": 2,
            "n_embd": 32,
            "n_head": 2,
            "vocab_size": 300,
            "n_positions": 32,
            "resid_pdrop": 0.1,
        },
    },
    "data": {"input": ["text.txt"]},
    "optimizer": {"schedule": {"name": "constant"}},
    "batch": {"size": 4, "micro": 1},
    "engine": {"threads": 1},
    "run": {"dir": "run", "steps": 1_000_000},
    "checkpoint": {"every": 50},
    "logging": {"every": 1},
    "cluster": {"lease": 30.0, "stall": 30.0, "spare": 0},
}
LONG = 240.0  # seconds in which what a busy machine does is done

pytestmark = pytest.mark.slow


class Job:
    """A run in a folder, as the same command submits it once or more often."""

    def __init__(self, slurm: Slurm, folder: Path, *overrides: str) -> None:
        self.slurm, self.folder, self.overrides = slurm, folder, overrides
        folder.mkdir()
        (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
        (folder / "text.txt").write_text("\n".join(f"line {i}" for i in range(2000)))
        self.number = ""

    def submit(self, nodes: int, *options: str) -> None:
        sizes = (f"--nodes={nodes}", "--cpus-per-task=1")
        run = (RECIPE, "run.yaml", f"engines={nodes}", *self.overrides)
        self.number = self.slurm.submit(self.folder, *sizes, *options, *run)

    def happened(self, kind: str) -> int:
        """How often the run has recorded something of its cluster."""
        return sum(e["event"] == "cluster" and e["kind"] == kind for e in self._events())

    def steps(self) -> int:
        """The last step that it has made."""
        return max((e["step"] for e in self._events() if e["event"] == "step"), default=0)

    def losses(self) -> list[float]:
        return _losses(self.folder / "run")

    def _events(self) -> list[dict]:
        return _events(self.folder / "run")

    def state(self) -> str:
        return self.slurm.job(self.number)["JobState"]

    def said(self) -> str:
        return (self.folder / f"slurm-{self.number}.out").read_text()

    def until(self, is_so, what: str, seconds: float = LONG) -> None:
        self.slurm.until(is_so, what, seconds)

    def until_steps(self, number: int) -> None:
        """Wait for some more steps."""
        last = self.steps() + number
        self.until(lambda: self.steps() >= last, f"job {self.number} makes step {last}")

    def until_state(self, *states: str) -> None:
        self.until(lambda: self.state() in states, f"job {self.number} is {states}")

    def until_nothing_is_left(self, *nodes: Host, lost: int = 0) -> None:
        """Wait until only SLURM's own daemon runs on nodes; look at what is on their disks, but
        for the folders of hosts that have lost their power."""
        self.until(lambda: not any(map(_programs, nodes)), "no process is left")
        folders = list(Path("/tmp").glob(f"penstock-{self.number}.*"))
        assert len(folders) == lost
        for folder in folders:
            shutil.rmtree(folder)


def has_the_bits_of_one_process(job: Job) -> bool:
    """Whether a run's losses, and the newest weights that it saved, are those of a run without
    a cluster."""
    losses = job.losses()
    [*_, saved] = sorted((job.folder / "run/checkpoints").glob("step-*"))
    last = int(saved.name.removeprefix("step-"))
    penstock = [sys.executable, "-c", "from penstock.cli import main; main()"]
    for steps in sorted({last, len(losses)}):
        done = subprocess.run(
            [*penstock, "train", "run.yaml", "run.dir=alone", f"run.steps={steps}"],
            cwd=job.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    tensors = sorted(saved.glob("*.safetensors"))
    assert tensors
    other = job.folder / "alone/checkpoints" / saved.name
    same = [path.read_bytes() == (other / path.name).read_bytes() for path in tensors]
    return all(same) and losses == _losses(job.folder / "alone")


def _events(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _losses(run: Path) -> list[float]:
    """The loss of every step of a run; of one that was made twice, the last."""
    made = {event["step"]: event["loss"] for event in _events(run) if event["event"] == "step"}
    assert sorted(made) == list(range(1, len(made) + 1))
    return [made[step] for step in sorted(made)]


def _programs(node: Host) -> list[str]:
    """What runs on a node beside SLURM's own daemon."""
    return [line for line in node.processes().values() if not line.startswith("slurmd ")]


def _token_of(node: Host) -> bytes:
    """The token that the Ray on a node asks for, from the environment of its process."""
    [raylet] = [path for path, line in node.processes().items() if "/raylet " in line]
    words = (raylet / "environ").read_bytes().split(b"\0")
    [token] = [word.partition(b"=")[2] for word in words if word.startswith(b"RAY_AUTH_TOKEN=")]
    return token


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    with whole_hosts(folder, "control", "node1", "node2", "node3") as (control, *nodes):
        commands = folder / "bin"
        commands.mkdir()
        (commands / "penstock").write_text(PENSTOCK)
        (commands / "penstock").chmod(0o755)
        paths = {
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        yield Slurm(folder, control, nodes, cpus=4, environment=paths)


def test_a_run_outlives_a_signal_and_its_nodes_to_the_bits_of_one_process(slurm, tmp_path):
    first, second, third = slurm.nodes
    job = Job(slurm, tmp_path / "job")
    job.submit(3)
    # Each of the three hosts offers one CPU and each engine asks for one.
    job.until(lambda: job.happened("joined") == 3, "three engines")
    job.until_steps(3)
    assert f"ray: head node1 at {first.address}:" in job.said()
    token = _token_of(first)
    for node in slurm.nodes:
        assert any("raylet" in line for line in node.processes().values())
        assert not any(token.decode() in line for line in node.processes().values())
    for folder in (tmp_path, slurm.folder, *Path("/tmp").glob(f"penstock-{job.number}.*")):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert not [path for path in files if token in path.read_bytes()]

    third.end()
    job.until(lambda: job.happened("engine lost") == 1, "an engine is lost")
    job.until(
        lambda: "node3" in slurm.nodes_by_state().get("down*", ()),
        "SLURM knows that the node is gone",
    )
    job.until_steps(5)
    assert job.state() == "RUNNING"
    assert job.happened("engine lost") == 1  # that on node2 is still there
    slurm.ask("scancel", "--batch", "--signal=TERM", job.number)
    job.until_state("FAILED")
    assert slurm.job(job.number)["ExitCode"] == f"{128 + signal.SIGTERM}:0"
    stopped = job.steps()
    assert f"stopped after step {stopped}: SIGTERM" in job.said()
    job.until_nothing_is_left(first, second, lost=1)

    # The same command, and now the host of the batch script goes: SLURM begins the job again.
    job.submit(2)
    job.until_steps(60)
    assert f"resumed from step {stopped}" in job.said()
    [batch] = [node for node in slurm.nodes if node.name == slurm.job(job.number)["BatchHost"]]
    batch.end()
    job.until_state("PENDING")
    for node in (batch, third):
        node.boot()
        slurm.start_node(node)
    slurm.until_idle(*slurm.nodes)
    slurm.ask("scontrol", "update", f"job={job.number}", "StartTime=now")
    job.until_state("RUNNING")
    assert slurm.job(job.number)["Restarts"] == "1"
    job.until_steps(10)

    slurm.ask("scancel", job.number)  # outright: nothing is saved
    job.until_state("CANCELLED")
    job.until_nothing_is_left(*slurm.nodes, lost=1)
    assert has_the_bits_of_one_process(job)


def test_jobs_share_nodes_and_are_told_before_their_time_is_over(slurm, tmp_path):
    short = Job(slurm, tmp_path / "short", "run.steps=60")
    long = Job(slurm, tmp_path / "long")
    short.submit(2, "--nodelist=node1,node2")
    # SLURM looks every half minute: it tells the job up to one minute too early, not too late.
    long.submit(2, "--nodelist=node1,node2", "--time=4", "--signal=B:TERM@90")
    short.until_state("COMPLETED")
    long.until_state("FAILED")
    assert f"stopped after step {long.steps()}: SIGTERM" in long.said()
    for job in (short, long):
        job.until_nothing_is_left(*slurm.nodes[:2])
        assert has_the_bits_of_one_process(job)
