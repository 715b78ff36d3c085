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

import hosts
import pytest
import slurm_cluster
import yaml
from hosts import Host, Network
from slurm_cluster import Slurm, programs

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
LONG = 600.0  # seconds in which what a busy machine does is done

pytestmark = pytest.mark.slow


class Job:
    """A run in a folder, and the job that trains it."""

    def __init__(self, slurm: Slurm, folder: Path, *overrides: str) -> None:
        self.slurm, self.folder, self.overrides = slurm, folder, overrides
        folder.mkdir()
        (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
        (folder / "text.txt").write_text("\n".join(f"line {i}" for i in range(2000)))
        self.number = ""

    def submit(self, *nodes: str, options: tuple[str, ...] = ()) -> None:
        """Submit it for nodes of these names, one engine on each."""
        sizes = (f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--cpus-per-task=1")
        run = (RECIPE, "run.yaml", f"engines={len(nodes)}", *self.overrides)
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

    def until_state(self, state: str) -> None:
        self.until(lambda: self.state() == state, f"job {self.number} is {state}")

    def until_nothing_is_left(self, *nodes: Host, lost: int = 0) -> None:
        """Wait until only SLURM's own daemon runs on nodes; look at what is on their disks, but
        for the folders of hosts that have lost their power."""
        self.until(lambda: not any(map(programs, nodes)), "no process is left")
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


def _token_of(node: Host) -> bytes:
    """The token that the Ray on a node asks for, from the environment of its process."""
    [raylet] = [path for path, line in programs(node).items() if "/raylet " in line]
    words = (raylet / "environ").read_bytes().split(b"\0")
    [token] = [word.partition(b"=")[2] for word in words if word.startswith(b"RAY_AUTH_TOKEN=")]
    return token


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("network")
    reason = slurm_cluster.why_not() or hosts.why_not(folder / "try")
    if reason is not None:
        pytest.skip(reason)
    network = Network(folder, 5)
    yield network
    network.close()


@pytest.fixture(scope="module")
def slurm(network, tmp_path_factory) -> Slurm:
    folder = tmp_path_factory.mktemp("slurm")
    commands = folder / "bin"
    commands.mkdir()
    (commands / "penstock").write_text(PENSTOCK)
    (commands / "penstock").chmod(0o755)
    paths = {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    return Slurm(folder, network, cpus=4, environment=paths)


def test_jobs_share_nodes_and_get_signal_before_time_limit(slurm, tmp_path):
    short = Job(slurm, tmp_path / "short", "run.steps=60")
    long = Job(slurm, tmp_path / "long")
    short.submit("host-1", "host-2")
    # SLURM looks every half minute: it tells the job up to one minute too early, not too late.
    long.submit("host-1", "host-2", options=("--time=4", "--signal=B:TERM@90"))
    short.until_state("COMPLETED")
    long.until_state("FAILED")
    assert f"stopped after step {long.steps()}: SIGTERM" in long.said()
    for job in (short, long):
        job.until_nothing_is_left(*slurm.nodes[:2])
        assert has_the_bits_of_one_process(job)


def test_run_saves_when_ray_head_ends(slurm, tmp_path):
    nodes = slurm.nodes[1:3]
    job = Job(slurm, tmp_path / "job")
    job.submit("host-2", "host-3")
    job.until_steps(3)
    [head] = [path for path, line in programs(nodes[0]).items() if "/gcs_server " in line]
    os.kill(int(head.name), signal.SIGKILL)
    job.until_state("FAILED")
    assert f"stopped after step {job.steps()}: SIGTERM" in job.said()
    job.until_nothing_is_left(*nodes)
    assert has_the_bits_of_one_process(job)


def test_job_continues_after_lost_node_until_signal(network, slurm, tmp_path):
    nodes = slurm.nodes[:3]
    job = Job(slurm, tmp_path / "job")
    job.submit("host-1", "host-2", "host-3")
    # Each of the three hosts offers one CPU and each engine asks for one.
    job.until(lambda: job.happened("joined") == 3, "three engines")
    job.until_steps(3)
    assert f"ray: head host-1 at {nodes[0].address}:" in job.said()
    token = _token_of(nodes[0])
    for node in nodes:
        lines = programs(node).values()
        assert any("/raylet " in line for line in lines)
        assert not any(token.decode() in line for line in lines)
    for folder in (tmp_path, slurm.folder, *Path("/tmp").glob(f"penstock-{job.number}.*")):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert not [path for path in files if token in path.read_bytes()]

    network.power_off(network.hosts.index(nodes[2]))
    job.until(lambda: job.happened("engine lost") == 1, "an engine is lost")
    job.until(lambda: "host-3" in slurm.nodes_by_state().get("down*", ()), "a node is down")
    job.until_steps(5)
    assert job.state() == "RUNNING"
    assert job.happened("engine lost") == 1  # that on host-2 is still there
    slurm.ask("scancel", "--batch", "--signal=TERM", job.number)
    job.until_state("FAILED")
    assert slurm.job(job.number)["ExitCode"] == f"{128 + signal.SIGTERM}:0"
    assert f"stopped after step {job.steps()}: SIGTERM" in job.said()
    job.until_nothing_is_left(*nodes[:2], lost=1)
    assert has_the_bits_of_one_process(job)


def test_job_is_requeued_after_loss_of_batch_host(network, slurm, tmp_path):
    job = Job(slurm, tmp_path / "job")
    job.submit("host-1", "host-4")
    job.until_steps(60)
    network.power_off(network.hosts.index(slurm.nodes[0]))
    job.until_state("PENDING")
    update = ("NodeList=host-2,host-4", "StartTime=now")  # else it waits for two minutes
    slurm.ask("scontrol", "update", f"JobId={job.number}", *update)
    job.until_state("RUNNING")
    assert slurm.job(job.number)["Restarts"] == "1"
    job.until_steps(10)
    assert "resumed from step" in job.said()

    slurm.ask("scancel", job.number)  # outright: nothing is saved
    job.until_state("CANCELLED")
    job.until_nothing_is_left(slurm.nodes[1], slurm.nodes[3], lost=1)
    assert has_the_bits_of_one_process(job)
