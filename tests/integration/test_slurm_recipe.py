"""The recipe for SLURM, with stand-ins for its commands: both "hosts" are this machine."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOB = "4711"
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
printf 'host1\\nhost2\\n'
"""
PENSTOCK = f"""#!/usr/bin/env bash
exec {sys.executable} -c 'from penstock.cli import main; main()' "$@"
"""
RUN = """
model: {preset: gpt2, n_layer: 1, n_embd: 16, n_head: 2, vocab_size: 300, n_positions: 32}
data: {input: [text.txt]}
batch: {size: 4, micro: 1}
engine: {threads: 1}
run: {dir: run, steps: 1000000}
logging: {every: 1}
cluster: {lease: 30, stall: 30}
"""


@pytest.mark.slow
def test_it_trains_on_all_hosts_and_saves_when_the_time_is_over(tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("penstock", PENSTOCK)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "text.txt").write_text("\n".join(f"line {i}" for i in range(2000)))
    (tmp_path / "run.yaml").write_text(RUN)
    environment = {
        **{key: value for key, value in os.environ.items() if "RAY_" not in key},
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": "host[1-2]",
        "SLURM_CPUS_PER_TASK": "2",
    }
    token = tmp_path / f".penstock-{JOB}.token"
    said, stopped = [], False
    with subprocess.Popen(
        # Four engines and a CPU for each: more than one of the two hosts has.
        ["bash", str(ROOT / "recipes/slurm/ray.sbatch"), "run.yaml", "engines=3"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        for line in job.stdout:
            said.append(line)
            if line.startswith("step 1/"):
                assert stat.S_IMODE(token.stat().st_mode) == 0o600
            joined = sum("joined" in seen for seen in said)
            if line.startswith("step ") and joined == 4 and not stopped:
                stopped = True
                job.send_signal(signal.SIGTERM)  # what follows is read until it has ended
    assert job.returncode == 128 + signal.SIGTERM, said
    assert any(line.startswith("step ") and "saved" in line for line in said)
    assert not token.exists()
    deadline = time.monotonic() + 60
    while left := _processes_with(str(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _processes_with(text: str) -> list[str]:
    """The processes in whose environment a text is, but for those of the tests themselves."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text.encode() in path.read_bytes():
                found.append(path.with_name("cmdline").read_text().replace("\0", " ").strip())
        except OSError:
            continue  # it has ended, or is another user's
    return found
