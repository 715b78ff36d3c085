"""The process that compiles kernels for the first start of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.kernels import code_cache, compiled_ahead
from penstock.kernels.processor import Processor
from penstock.telemetry import Notice
from penstock.training import KernelWorker, kernel_worker
from penstock.training.kernel_worker import groups_of

SMALL = {"preset": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 257}
GROUPS = [
    "masters",
    "attention:16",
    "gelu",
    "transposition",
    "loss",
    "gradients",
    "adamw",
    "evaluation",
]


def config(**changes: Any) -> Config:
    return Config.from_mapping({"model": SMALL, "precision": "fp32", **changes})


@pytest.fixture(autouse=True)
def room(tmp_path, monkeypatch) -> None:
    """A host on which the process helps, where no kernel is compiled."""
    monkeypatch.setattr(kernel_worker.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(kernel_worker.process_memory, "available_bytes", lambda: 8 << 30)
    monkeypatch.setattr(code_cache, "code_folder", lambda: tmp_path)
    use_processor(monkeypatch, "AuthenticAMD")


def use_processor(monkeypatch, vendor: str) -> None:
    found = Processor("x86_64", vendor)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: found))


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The commands of the processes, each of which ends at once without a failure."""
    commands: list[list[str]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return popen([sys.executable, "-c", ""], **options)

    monkeypatch.setattr(kernel_worker.subprocess, "Popen", start)
    return commands


def start(settings: Config) -> None:
    with KernelWorker() as worker:
        worker.start(settings)


def test_process_is_started_once_for_each_kind_of_run(started):
    for precision in ("fp32", "bf16", "fp32", "bf16"):
        start(config(precision=precision))
    without = [each for each in GROUPS if each != "transposition"]
    assert [command[3:] for command in started] == [["fp32", *GROUPS], ["bf16", *without]]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"factory": "torch.nn:Identity"}},
        {"memory": "2GiB"},
        {"cluster": {"start": "local"}},
        {"sparsity": {"method": "static", "sparsity": 0.5}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_run_of_which_less_is_known_starts_no_process(changes, started):
    start(config(**changes))
    assert started == []


@pytest.mark.parametrize("lacks", ["core", "memory", "folder"])
def test_host_without_room_starts_no_process(lacks, started, monkeypatch):
    if lacks == "core":
        monkeypatch.setattr(kernel_worker.os, "sched_getaffinity", lambda _: {0})
    elif lacks == "memory":
        monkeypatch.setattr(kernel_worker.process_memory, "available_bytes", lambda: 1 << 30)
    else:
        monkeypatch.setattr(code_cache, "code_folder", lambda: None)
    start(config())
    assert started == []


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"model": {**SMALL, "n_embd": 24}}, "attention:16"),
        ({"model": {**SMALL, "attn_pdrop": 0.1}}, "attention:16"),
        ({"model": {**SMALL, "activation_function": "relu"}}, "gelu"),
        ({"optimizer": {"name": "lion"}}, "adamw"),
        ({"evaluation": {"every": None}}, "evaluation"),
    ],
)
def test_kernels_that_a_run_does_not_call_are_not_compiled(changes, missing):
    assert groups_of(config(**changes)) == [each for each in GROUPS if each != missing]


def test_copies_for_onednn_are_compiled_where_it_multiplies(monkeypatch):
    use_processor(monkeypatch, "GenuineIntel")
    assert groups_of(config()) == [each for each in GROUPS if each != "transposition"]


def test_failure_is_a_notice_once_and_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(kernel_worker, "groups_of", lambda _: ["another"])
    heard: list[Any] = []
    with KernelWorker() as worker:
        worker.start(config())
        assert worker._process is not None
        worker._process.wait()
        tell = worker.watched(heard.append)
        tell(Notice("a"))
        tell(Notice("b"))
    assert [each.text for each in heard[1:]] == ["a", "b"]
    assert "has failed (KeyError: 'another'); this process compiles them" in heard[0].text


def test_process_ends_with_the_context_and_with_the_run():
    with KernelWorker() as worker:
        worker.start(config())
        process = worker._process
        assert process is not None
    assert process.poll() is not None
    command = [sys.executable, "-m", "penstock.kernels.compiled_ahead", "fp32", "attention:16"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=_empty_cache()) as alone:
        assert alone.stdin is not None
        alone.stdin.close()  # as when the process of the run is killed
        assert alone.wait(60) == 0


def _empty_cache() -> dict[str, str]:
    return {**os.environ, "NUMBA_CACHE_DIR": str(Path(os.devnull) / "none")}


RUN = """
import sys
import numpy as np
import penstock
from penstock.data import ArraySource
rows = np.random.default_rng(0).integers(0, 257, (8, 17))
source = ArraySource({"input_ids": rows[:, :-1], "labels": rows[:, 1:]})
config = {
    "model": {"preset": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 257},
    "data": {"sequence_length": 16},
    "batch": {"size": 4, "micro": 2},
    "precision": sys.argv[1],
    "run": {"dir": sys.argv[2], "steps": 2},
}
trainer = penstock.Trainer(config, source=source, held_out=source, quiet=True)
trainer.evaluate(1)
trainer.train()
import torch
from penstock.compiler import has_onednn, onednn_products
if has_onednn():  # the run's own products are too small
    onednn_products.linear(torch.ones(8, 4).t(), torch.ones(8, 4).t())
"""

AGAIN = """
import sys
from penstock.kernels import compiled_ahead
for group in sys.argv[2:]:
    name, _, size = group.partition(":")
    compiled_ahead.GROUPS[name](compiled_ahead.TYPES[sys.argv[1]], size)
assert "numba.np.linalg" not in sys.modules, "code was compiled instead of read"
"""


@pytest.mark.long
@pytest.mark.parametrize("precision", compiled_ahead.TYPES)
def test_kernels_of_a_run_are_those_that_the_process_compiles(precision, tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "code")}

    def code() -> set[str]:
        return {path.name for path in (tmp_path / "code").rglob("*.nbc")}

    worker = [sys.executable, "-m", "penstock.kernels.compiled_ahead", precision, *GROUPS]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, env=environment) as process:
        assert process.wait(300) == 0
    compiled = code()
    assert len(compiled) > 10
    run = [sys.executable, "-c", RUN, precision, str(tmp_path / "run")]
    subprocess.run(run, env=environment, cwd=tmp_path, check=True)
    assert code() == compiled
    again = [sys.executable, "-c", AGAIN, precision, *GROUPS]
    subprocess.run(again, env=environment, stdin=subprocess.PIPE, check=True)
