"""One number caps the whole process; the system's own count of resident memory is the judge."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock import Trainer
from penstock.config import ByteSize
from penstock.data import ArraySource
from penstock.engine import host_memory
from penstock.errors import BudgetError
from penstock.planning import builders, machine_limits, store_factory
from penstock.planning.machine_limits import Machine
from penstock.telemetry import process_memory
from penstock.telemetry.events import RunMeasured

MIB = 1 << 20


@pytest.mark.long
def test_run_on_flash_stays_below_its_memory_limit(tmp_path):
    cap = 880 * MIB
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("capped_run.py"), tmp_path / "run", f"{cap}B"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1:3]))},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["peak"] <= cap
    assert seen["told"] == pytest.approx(seen["peak"], rel=0.02)
    assert seen["engine_used"] <= seen["engine"]
    assert seen["store"] > 30 * MIB  # what the rest leaves, not a token


def settings(folder: Path, **more) -> dict:
    return {
        "model": {"preset": "tiny", "n_positions": 64, "vocab_size": 96},
        "batch": {"size": 4, "micro": 2},
        "engine": {"device": "cpu"},
        "run": {"dir": str(folder), "steps": 2},
        "evaluation": {"every": None},
        **more,
    }


def tokens() -> ArraySource:
    rows = np.random.default_rng(0).integers(0, 96, (16, 65))
    return ArraySource({"input_ids": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()})


@pytest.fixture
def machine(monkeypatch):
    """A machine on which the libraries take 400 MiB and 600 MiB are free."""
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: 400 * MIB)
    monkeypatch.setattr(process_memory, "available_bytes", lambda: 600 * MIB)


def test_impossible_memory_limit_is_refused_with_sums_and_remedy(tmp_path, machine):
    store = {"dram": "300MiB", "flash": {"path": str(tmp_path / "flash")}}
    with pytest.raises(BudgetError) as caught:
        Trainer(settings(tmp_path, memory="700MiB", store=store), source=tokens())
    lines = str(caught.value).splitlines()
    assert lines[0] == "memory: 700MiB cannot hold this run:"
    parts = {line[:42].strip(): line[42:].split() for line in lines[1:-1]}
    assert parts["libraries and compiled model, measured"] == ["400.00", "MiB"]
    assert parts["store, on flash besides (store.dram)"] == ["300.00", "MiB"]
    assert parts["limit"] == ["700.00", "MiB"]
    sizes = {name: float(number) for name, (number, _) in parts.items()}  # in one unit
    total, limit = sizes.pop("sum"), sizes.pop("limit")
    assert total == pytest.approx(sum(sizes.values()), abs=1)  # each is rounded up
    words = r"The sum is ([\d.]+) MiB above the limit: raise memory above ([\d.]+) MiB, or "
    over, least = re.match(words, lines[-1]).groups()
    assert float(over) == pytest.approx(total - limit, abs=0.02)
    assert float(least) == total
    assert "lower store.dram to " in lines[-1]
    # What it says to lower to is enough.
    lower = lines[-1].split("lower store.dram to ")[1].split(",")[0].rstrip(".")
    assert ByteSize.parse(lower) < 300 * MIB
    store["dram"] = lower
    Trainer(settings(tmp_path, memory="700MiB", store=store), source=tokens()).close()


def test_free_memory_is_the_limit_by_default(tmp_path, machine):
    trainer = Trainer(settings(tmp_path), source=tokens())
    shares = trainer._layout.shares
    assert shares.engine + shares.store < 600 * MIB
    with pytest.raises(BudgetError, match=r"this machine has 1000\.00 MiB for this process, which"):
        Trainer(
            settings(tmp_path, store={"dram": "1GiB", "flash": {"path": str(tmp_path / "f")}}),
            source=tokens(),
        )
    assert not (tmp_path / "f").exists()


def test_engines_of_this_process_keep_pages_as_its_memory_allows(tmp_path, machine, monkeypatch):
    settled = []
    monkeypatch.setattr(
        "penstock.step.local_engines.settle_pages",
        lambda *given, **how: settled.append((given, how)),
    )
    store = {"flash": {"path": str(tmp_path / "flash")}}
    trainer = Trainer(settings(tmp_path, memory="700MiB", store=store), source=tokens())
    shares = trainer._layout.shares
    trainer.close()
    assert settled == [((shares,), {"are_at_once": False})]
    assert 600 * MIB < shares.limit < 700 * MIB


def test_setting_of_pages_ends_with_the_trainer(tmp_path, monkeypatch):
    before = dict(host_memory._settings)
    trainer = Trainer(settings(tmp_path / "run"), source=tokens())
    assert len(host_memory._settings) == len(before) + 1
    trainer.close()
    assert host_memory._settings == before
    monkeypatch.setattr(builders, "make_engines", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Trainer(settings(tmp_path / "other"), source=tokens())
    assert host_memory._settings == before


def test_free_pages_are_not_measured_as_memory_of_libraries(monkeypatch):
    order = []
    monkeypatch.setattr(machine_limits, "return_free_pages", lambda: order.append("returned"))
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: order.append("read") or MIB)
    Machine.here()
    assert order == ["returned", "read"]


def test_planned_memory_of_a_store_counts_tied_gradients_in_float32(tmp_path):
    trainer = Trainer(settings(tmp_path, precision="bf16"), source=tokens())
    program, store = trainer.program, trainer.store
    planned = store_factory.dram_store_bytes(trainer.config, program)
    found = sum(store.memory_bytes.values())
    trainer.close()
    assert 0 <= found - planned < 64 * len(program.weights)
    tied = program.weights["transformer.wte.weight"].elements
    assert planned == sum(14 * weight.elements for weight in program.weights.values()) + 2 * tied


def test_run_reports_the_parts_of_its_time(tmp_path):
    told: list[RunMeasured] = []
    steps = []

    def listen(event):
        if isinstance(event, RunMeasured):
            told.append(event)
        elif hasattr(event, "compute_seconds"):
            steps.append(event)

    store = {"dram": "40MiB", "flash": {"path": str(tmp_path / "flash")}}
    trainer = Trainer(settings(tmp_path, store=store), source=tokens(), on_event=listen)
    summary = trainer.train()
    (run,) = told
    parts = [
        run.compute_seconds,
        run.flash_wait_seconds,
        run.weight_seconds,
        run.update_seconds,
        run.snapshot_seconds,
    ]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(run.step_seconds, rel=0.02)
    assert run.steps == 2
    assert 0 < run.flash_written_bytes <= run.flash_rule_written_bytes
    assert run.flash_read_bytes <= run.flash_rule_read_bytes
    state = trainer.program.parameters * 12  # fp32 weights, and two moments
    assert run.flash_rule_written_bytes >= 2 * state
    assert run.flash_rule_written_bytes == pytest.approx(2 * state, rel=0.05)  # padding
    assert summary["peak_rss_bytes"] >= run.peak_rss_bytes > 100 * MIB
    trainer.close()
