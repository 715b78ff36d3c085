"""A small GPT trains on the simulated mesh: losses within rounding of the CPU, cycles simulated."""

from __future__ import annotations

import pytest
from plain_training import Recipe, trainer_of
from sparse_choices import chosen
from tiny_models import language_model
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.errors import ConfigError
from penstock.telemetry import read_metrics, reported

SIMULATED = {"device": "wafer", "mesh": "4x4", "cycles": "simulated"}
RECIPE = Recipe(steps=3, warmup_steps=1, size=2, micro=2)
RIGL = {"method": "rigl", "sparsity": 0.9, "update_every": 2, "update_end": 3}
LONG = pytest.mark.long
CHANGES = {
    "dense": {},
    "sparse": {"sparsity": RIGL},
    "adapters": {"lora": {"rank": 2, "alpha": 4.0, "targets": ["*.attn.c_attn.weight"]}},
    "recompute": {"engine": {"recompute": "always"}},
}


@pytest.fixture(autouse=True)
def measure_nothing():
    with chosen():
        yield


def run(folder, until=None, family="gpt2", **changes):
    trainer, events = trainer_of(language_model(family), RECIPE, folder, until, **changes)
    trainer.train()
    trainer.close()
    return events


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Return the steps of a dense run on the mesh, and its folder."""
    folder = tmp_path_factory.mktemp("dense")
    return run(folder, **on_mesh({})), folder


def on_mesh(changes):
    return {**changes, "engine": {**changes.get("engine", {}), **SIMULATED}}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("dense", "gpt2"),
        ("sparse", "gpt2"),
        pytest.param("adapters", "gpt2", marks=LONG),
        pytest.param("recompute", "gpt2", marks=LONG),
        pytest.param("dense", "llama", marks=LONG),
        pytest.param("sparse", "llama", marks=LONG),
    ],
)
def test_losses_are_those_of_the_cpu_within_rounding_and_cycles_are_simulated(
    name, family, dense, tmp_path
):
    expected = run(tmp_path / "cpu", family=family, **CHANGES[name])
    if (name, family) == ("dense", "gpt2"):
        found, _ = dense
    else:
        found = run(tmp_path / "mesh", family=family, **on_mesh(CHANGES[name]))
    assert [event.loss for event in found] == pytest.approx(
        [event.loss for event in expected], rel=2e-6
    )
    for event in found:
        cycles = event.cycles
        blocks = [name for name in cycles.stages if name not in ("embed", "head")]
        assert cycles.simulated > cycles.closed_form > 0
        for block in blocks:
            assert set(cycles.stages[block]) >= {"forward"}
            assert cycles.stages[block]["forward"]["simulated"] > 0
            assert cycles.stages[block]["backward"]["simulated"] > 0


def test_sparse_products_take_fewer_simulated_cycles(dense, tmp_path):
    usual_run, _ = dense
    sparse = run(tmp_path, until=1, **on_mesh({"sparsity": {"method": "static", "sparsity": 0.95}}))
    stage = "transformer.h.0"
    for sweep in ("forward", "backward"):
        usual, fewer = (events[0].cycles.stages[stage][sweep] for events in (usual_run, sparse))
        assert fewer["simulated"] < 0.5 * usual["simulated"]
        assert fewer["closed_form"] == pytest.approx(usual["closed_form"])


@pytest.mark.long
def test_metrics_say_which_cycles_are_simulated_and_a_resume_keeps_the_mesh(tmp_path):
    run(tmp_path, until=2, **on_mesh({}))
    rows = read_metrics(tmp_path / "metrics.jsonl")
    step = next(row for row in rows if row["event"] == "step")
    figures = step["cycles"]["stages"]["transformer.h.0"]["forward"]
    assert set(figures) == {"closed_form", "simulated"}
    measured = reported(rows[-1])
    simulated, closed = measured.simulated_cycles / 2, measured.closed_form_cycles / 2
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).stdout
    assert (
        f"wafer        a step's cycles on the wafer: {simulated + closed:,.0f}, of which "
        f"{closed:,.0f} closed form, {simulated:,.0f} simulated; "
    ) in shown
    with pytest.raises(ConfigError) as refused:
        run(tmp_path, engine={"device": "cpu"})
    assert 'engine.cycles: "simulated" in the run, null now' in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        run(tmp_path, engine={**SIMULATED, "mesh": "4x8"})
    assert 'engine.mesh: "4x4" in the run, "4x8" now' in str(refused.value)
    assert len(run(tmp_path, **on_mesh({}))) == 1
