"""A whole run of several processes, in which whatever of ours unpickles anything is caught."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Is run at the start of every Python process, before anything of the run is imported. Libraries may
# unpickle files of their own (Numba's cache is one); code of Penstock may not, by any way.
WATCH = """
import marshal, os, pickle, shelve, sys
import torch

def write(line):
    with open(os.environ["WATCHED"], "a") as file:
        file.write(line + "\\n")

def refuse(what):
    frame = sys._getframe(2)
    between = ("pickle", "_pickle", "marshal", "shelve", "torch.serialization", "sitecustomize")
    while frame is not None and frame.f_globals.get("__name__", "") in between:
        frame = frame.f_back
    caller = "" if frame is None else frame.f_globals.get("__name__", "")
    if caller.split(".")[0] == "penstock":
        write(f"{caller} calls {what}")
        raise RuntimeError(f"{caller} calls {what}")

def watched(what, function):
    def call(*arguments, **options):
        refuse(what)
        return function(*arguments, **options)
    return call

class Unpickler(pickle.Unpickler):
    def __init__(self, *arguments, **options):
        refuse("pickle.Unpickler")
        super().__init__(*arguments, **options)

def hear(event, arguments):
    if event == "pickle.find_class":
        refuse(event)

sys.addaudithook(hear)
pickle.Unpickler = Unpickler
for module, name in (
    (pickle, "load"), (pickle, "loads"), (marshal, "load"), (marshal, "loads"),
    (shelve, "open"), (torch, "load"),
):
    setattr(module, name, watched(f"{module.__name__}.{name}", getattr(module, name)))
write(f"process {os.getpid()}")
os.register_at_fork(after_in_child=lambda: write(f"process {os.getpid()}"))
"""

RUN = """
import pickle, sys
from pathlib import Path
from penstock.training.trainer import Trainer

folder = Path(sys.argv[1])
small = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 300, "n_positions": 16}
trainer = Trainer({
    "model": {"preset": "gpt2", "overrides": small},
    "data": {"input": [str(folder / "text.txt")], "path": str(folder / "data")},
    "batch": {"size": 2, "micro": 1},
    "engine": {"threads": 1},
    "engines": 1,
    "store": {"shards": 1},
    "cluster": {"start": "local", "spare": 0, "shards": "apart"},
    "run": {"dir": str(folder / "run"), "steps": 2},
})
workers = list(trainer._runner.manager.launcher.pids.values())
trainer.train()
trainer.store.content_hash()  # the weights come from their shard, by calls
trainer.close()
print(*workers)
try:  # and the watch would have seen it
    exec("pickle.loads(pickle.dumps([]))", {"__name__": "penstock.control", "pickle": pickle})
except RuntimeError as error:
    print(error)
"""


@pytest.mark.long
def test_no_process_of_a_run_unpickles_anything(tmp_path):
    """An engine and a shard join, are told what they are, are called, and make two steps."""
    (tmp_path / "text.txt").write_text("\n".join(f"line {i}: water" for i in range(200)))
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    watched = tmp_path / "watched.txt"
    ran = subprocess.run(
        [sys.executable, "-c", RUN, tmp_path],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "WATCHED": str(watched)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    workers, caught = ran.stdout.splitlines()[-2:]
    assert caught == "penstock.control calls pickle.loads"
    seen = watched.read_text().splitlines()
    assert [line for line in seen if " calls " in line] == [caught]
    assert len(workers.split()) == 2
    assert {f"process {pid}" for pid in workers.split()} <= {*seen}
