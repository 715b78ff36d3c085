"""A log that nobody reads, or whose disk is full, costs no step; neither do figures without room.

The command runs in a process of its own, with real pipes, a device that is always full, and a real
limit on the size of files.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start
import yaml
from grids import quick_first
from waiting import wait_until

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
SETTINGS = {
    "model": {"preset": "tiny", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 16},
    "data": {"input": ["text.txt"]},
    "batch": {"size": 4, "micro": 2},
    "engine": {"threads": 1},
    "evaluation": {"every": None},
    "checkpoint": {"every": None},
    "logging": {"every": 1},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("water over the dam\n" * 500)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
    return tmp_path


def train(folder, *overrides, **streams):
    command = [sys.executable, "-m", "penstock", "train", "run.yaml", *overrides]
    streams = {"stderr": subprocess.PIPE, **streams}
    return warm_start.Popen(command, cwd=folder, text=True, env=ENVIRONMENT, **streams)


def saved_step(folder):
    checkpoints = sorted((folder / "runs/run/checkpoints").glob("step-*/state.json"))
    return int(checkpoints[-1].parent.name.removeprefix("step-")) if checkpoints else None


def test_broken_pipe_stops_and_saves_the_run(folder):
    with train(folder, "run.steps=100000", stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        process.stdout.close()
        told = process.stderr.read().splitlines()
    assert process.returncode == 128 + signal.SIGPIPE, told
    assert told[0] == "no process reads the output: stopping after this step"
    step = saved_step(folder)
    assert step >= 3
    assert told[-2:] == [
        f"stopped after step {step}: no process reads the output",
        "resume with: penstock train run.yaml run.steps=100000",
    ]


def test_broken_pipe_of_both_streams_stops_and_saves_the_run(folder):
    """A connection that was dropped: there is nobody left to tell."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with train(folder, "run.steps=100000", **streams) as process:
        for line in process.stdout:
            if line.startswith("step 2/"):
                break
        process.stdout.close()
    assert process.returncode == 128 + signal.SIGPIPE
    assert saved_step(folder) >= 2


def test_full_disk_of_the_log_is_reported_once_and_the_run_continues(folder):
    with open("/dev/full", "w") as full:
        process = train(folder, "run.steps=4", stdout=full)
        _, told = process.communicate()
    assert told == "note: cannot write the log: No space left on device; the run continues\n"
    assert process.returncode == 0
    assert saved_step(folder) == 4


def test_full_disk_of_stderr_does_not_hide_model_errors(folder):
    (folder / "own.py").write_text(
        "import sys, torch\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table, self.head = torch.nn.Embedding(257, 8), torch.nn.Linear(8, 257)\n"
        "    def forward(self, input_ids):\n"
        "        print('a warning of its own', file=sys.stderr)\n"
        "        return self.head(self.table(input_ids))\n"
    )
    settings = SETTINGS | {"model": {"factory": "own:Own", "task": "causal_lm"}}
    settings["data"] = settings["data"] | {"sequence_length": 16}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    with open("/dev/full", "w") as full:
        process = train(folder, "run.steps=2", stdout=subprocess.PIPE, stderr=full)
        out, _ = process.communicate()
    assert "finished: steps 2" in out
    assert process.returncode == 0


def test_metrics_that_cannot_be_written_stop_and_save_the_run(folder):
    """`metrics.jsonl` reaches a limit on the size of files; no other file comes near it.

    Events of a cluster stay in it, whatever step a run begins at.
    """
    limit = 3 << 20
    metrics = folder / "runs/run/metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    row = json.dumps({"event": "cluster", "step": 0, "text": "x" * 400}) + "\n"
    metrics.write_text(row * ((limit - 1000) // len(row)))
    limits = {resource.RLIMIT_FSIZE: limit}
    process = train(folder, "run.steps=100000", stdout=subprocess.PIPE, limits=limits)
    out, err = process.communicate()
    assert process.returncode == 7
    step = saved_step(folder)
    assert 1 <= step < 10
    told = "runs/run/metrics.jsonl: cannot write metrics: File too large"
    assert out.splitlines()[-2:] == [
        f"stopped after step {step}: {told}",
        "resume with: penstock train run.yaml run.steps=100000",
    ]
    assert err == (
        f"error: {told}; the run was saved and stopped: raise the limit of 3,145,728 bytes for "
        "a file of this process (ulimit -f), then give the same command again to resume\n"
    )


@pytest.mark.long
def test_unwritable_result_gives_a_one_line_error(folder):
    process = train(folder, "run.steps=1", "--quiet", stdout=subprocess.DEVNULL)
    assert process.communicate() == (None, "")
    assert process.returncode == 0
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "penstock", "inspect", "runs/run"]
        found = warm_start.run(
            command, cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
    assert found.returncode == 7
    assert found.stderr == "error: standard output: No space left on device\n"


def test_exit_code_is_kept_when_stderr_is_lost(folder):
    with open("/dev/full", "w") as full:
        assert train(folder, "run.stepz=1", stdout=full, stderr=full).wait() == 2
    assert not Path(folder / "runs").exists()


@pytest.mark.parametrize("closed", quick_first([(0, 1, 2), (1,), (2,)], [(0, 1, 2), (2,)]))
def test_closed_streams_do_not_become_files_of_the_run(folder, closed):
    """The system gives a free descriptor to the next file: standard error would be the store."""
    settings = SETTINGS | {"store": {"flash": {"path": "flash"}}}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    metrics = folder / "runs/run/metrics.jsonl"
    with train(folder, "run.steps=100000", closed=closed, stderr=None) as process:
        try:
            wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, "steps")
            opened = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (0, 1, 2)]
        finally:
            process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not [name for name in opened if name.startswith(str(folder))]
    written = [*(folder / "flash").iterdir(), *(folder / "runs/run").iterdir()]
    assert not [path for path in written if path.is_file() and b"stopping" in path.read_bytes()]


def test_exit_code_is_kept_when_all_streams_are_closed(folder):
    command = f"exec {sys.executable} -m penstock train run.yaml run.stepz=1 <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=folder, env=ENVIRONMENT).returncode == 2
