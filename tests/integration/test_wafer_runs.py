"""A run on a simulated wafer: the numbers of the CPU, and the cycles of every stage."""

from __future__ import annotations

import functools

import pytest
import torch
from plain_training import Recipe, trainer_of
from sparse_choices import chosen
from tiny_models import language_model
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.engine import WaferEngine
from penstock.errors import BudgetError, ConfigError
from penstock.telemetry import Notice, RunMeasured, read_metrics, reported
from penstock.wafer import SIM, load_parameters
from penstock.wafer.closed_form import StreamedProduct, forward, stage_cycles

WAFER = {"device": "wafer", "mesh": "8x8"}
RECIPE = Recipe(steps=6, warmup_steps=2, size=8, micro=2)
RIGL = {"method": "rigl", "sparsity": 0.8, "update_every": 2, "update_end": 5}
LORA = {"rank": 2, "alpha": 4.0, "targets": ["*.attn.c_attn.weight"]}
CHANGES = {
    "dense": {},
    "sparse": {"sparsity": RIGL},
    "bf16": {"precision": "bf16"},
    "adapters": {"lora": LORA},
    "frozen": {"freeze": ["*.attn.c_attn.weight"]},
    "recompute": {"engine": {"recompute": "always"}},
    "two engines": {"engines": 2},
    "sparse head": {"sparsity": {**RIGL, "weights": ["transformer.wte.weight"]}},
}


@pytest.fixture(autouse=True)
def measure_nothing():
    with chosen():
        yield


def run(folder, until=None, recipe=RECIPE, **changes):
    trainer, events = trainer_of(language_model("gpt2"), recipe, folder, until, **changes)
    trainer.train()
    weights = trainer.store.content_hash()
    trainer.close()
    return [event.loss for event in events], weights, events, trainer


def on_wafer(changes):
    return {**changes, "engine": {**changes.get("engine", {}), **WAFER}}


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory):
    """Return a run on the wafer with some of `CHANGES`, and its folder."""

    @functools.cache
    def of_kind(name):
        folder = tmp_path_factory.mktemp("wafer") / "run"
        with chosen():
            return run(folder, **on_wafer(CHANGES[name])), folder

    return of_kind


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "sparse",
        "adapters",
        pytest.param("bf16", marks=LONG),
        pytest.param("frozen", marks=LONG),
        "recompute",
        "two engines",
        "sparse head",
    ],
)
def test_numbers_are_those_of_the_cpu_to_the_bit_and_each_stage_has_cycles(name, of_kind, tmp_path):
    expected, (found, _) = run(tmp_path / "cpu", **CHANGES[name]), of_kind(name)
    assert found[:2] == expected[:2]
    assert all(event.cycles is None for event in expected[2])
    stages = [stage.name for stage in found[3].program.stages]
    for event in found[2]:
        cycles = event.cycles
        assert (cycles.mesh, cycles.cores, cycles.simulated) == ("8x8", "sim", 0.0)
        assert list(cycles.stages) == stages
        parts = [
            figures["closed_form"]
            for sweeps in cycles.stages.values()
            for figures in sweeps.values()
        ]
        assert min(parts) > 0
        assert cycles.closed_form == pytest.approx(sum(parts))
        assert list(cycles.stages[stages[-1]]) == ["turn"]
        assert "forward" in cycles.stages[stages[0]]
        assert next(iter(cycles.stages[stages[1]])) == "forward"


def cycles_of(found, stage, sweep):
    return [event.cycles.stages[stage][sweep]["closed_form"] for event in found[2]]


def test_cycles_of_a_stage_are_its_closed_form_for_each_micro_batch(of_kind):
    found, _ = of_kind("dense")
    program, wafer = found[3].program, found[3].engines[0].wafer
    assert isinstance(found[3].engines[0], WaferEngine)
    stage = program.stages[1]
    place = wafer.kinds[stage.kind.digest]
    assert (place.tokens, place.head_size) == (2 * 16, 8)
    for sweep in ("forward", "backward"):
        one = stage_cycles(stage.kind.costs[sweep], 32, place.layout, SIM, head_size=8)
        assert cycles_of(found, stage.name, sweep) == [pytest.approx(4 * one.cycles)] * 6


def test_cycles_follow_the_entries_of_each_step(of_kind, tmp_path):
    pruned = {"method": "gmp", "sparsity": 0.95, "update_every": 1}
    pruned["schedule"] = {"begin": 1, "end": 5}
    dense, _ = of_kind("dense")
    sparse = run(tmp_path / "sparse", **on_wafer({"sparsity": pruned}))
    stage = sparse[3].program.stages[1].name
    for sweep in ("forward", "backward"):
        found = cycles_of(sparse, stage, sweep)
        assert found == sorted(found, reverse=True)
        assert found[-1] < 0.9 * found[0]
        assert found[-1] < cycles_of(dense, stage, sweep)[0]


def test_dense_gradients_of_a_mask_change_cost_cycles_in_backward_alone(of_kind):
    found, _ = of_kind("sparse")
    changing = [event.step for event in found[2] if event.changed_entries]
    assert changing == [2, 4]
    stage = found[3].program.stages[1].name
    backward, ahead = cycles_of(found, stage, "backward"), cycles_of(found, stage, "forward")
    usual, more = {backward[n] for n in (0, 2, 4, 5)}, {backward[n] for n in (1, 3)}
    assert len(usual) == len(more) == len(set(ahead)) == 1
    assert min(more) > max(usual)


def test_recomputation_costs_cycles(of_kind):
    (kept, _), (again, _) = of_kind("dense"), of_kind("recompute")
    stage = kept[3].program.stages[1].name
    ahead, back = cycles_of(kept, stage, "forward")[0], cycles_of(kept, stage, "backward")[0]
    assert cycles_of(again, stage, "forward")[0] == ahead
    assert back < cycles_of(again, stage, "backward")[0] < 1.2 * (ahead + back)


def test_a_run_goes_on_from_the_cpu_to_the_wafer_and_back(tmp_path):
    expected = run(tmp_path / "whole")
    folder = tmp_path / "parts"
    first = run(folder, until=2)
    second = run(folder, until=4, **on_wafer({}))
    third = run(folder)
    assert first[0] + second[0] + third[0] == expected[0]
    assert third[1] == expected[1]


def test_closed_form_run_goes_on_with_another_mesh(of_kind, tmp_path):
    whole, _ = of_kind("dense")
    first = run(tmp_path, until=3, **on_wafer({}))
    second = run(tmp_path, engine={**WAFER, "mesh": "4x16"})
    assert first[0] + second[0] == whole[0]
    assert second[1] == whole[1]
    assert [event.cycles.mesh for event in (*first[2], *second[2])] == ["8x8"] * 3 + ["4x16"] * 3


def test_store_on_flash_has_the_same_numbers_and_cycles(of_kind, tmp_path):
    usual, _ = of_kind("dense")
    store = {"dram": "16MiB", "flash": {"path": str(tmp_path / "flash")}}
    found = run(tmp_path / "run", store=store, **on_wafer({}))
    assert found[:2] == usual[:2]
    assert [event.cycles for event in found[2]] == [event.cycles for event in usual[2]]


def test_cycles_of_a_sparse_head_follow_its_masks(of_kind):
    (dense, _), (sparse, _) = of_kind("dense"), of_kind("sparse head")
    head = sparse[3].program.stages[-1].name
    found, usual = (cycles_of(each, head, "turn") for each in (sparse, dense))
    changing = [n for n in range(6) if n in (1, 3)]  # before a change of masks: all gradients
    assert all(found[n] < usual[n] for n in range(6))
    assert len({found[n] for n in range(6) if n not in changing}) == 1
    assert min(found[n] for n in changing) > found[0]


def test_metrics_and_totals_say_that_cycles_are_closed_form(of_kind):
    found, folder = of_kind("dense")
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["loss"] for row in steps] == found[0]
    stages = steps[-1]["cycles"]["stages"]
    names = [stage.name for stage in found[3].program.stages]
    assert list(stages) == names
    assert set(stages[names[1]]) == {"forward", "backward"}
    assert set(stages[names[1]]["forward"]) == {"closed_form"}
    measured = reported(rows[-1])
    assert isinstance(measured, RunMeasured)
    total = sum(row["cycles"]["closed_form"] for row in steps)
    assert measured.closed_form_cycles == pytest.approx(total)
    assert (measured.simulated_cycles, measured.clock_hz) == (0.0, 1.1e9)
    shown = CliRunner().invoke(app, ["inspect", str(folder)]).stdout
    milliseconds = f"{total / 6 / 1.1e6:.3g}"
    assert (
        f"wafer        a step's cycles on the wafer: {total / 6:,.0f} closed form; "
        f"{milliseconds} ms at 1.1 GHz\n"
    ) in shown
    assert "cycles       of step 6 on 8x8 cores (sim)\n" in shown
    ahead, back = (stages[names[1]][sweep]["closed_form"] for sweep in ("forward", "backward"))
    assert f"             {names[1]:<24}{ahead:>14,.0f}{back:>14,.0f}  closed form\n" in shown
    turn = f"{stages[names[-1]]['turn']['closed_form']:,.0f} for both"
    assert f"             {names[-1]:<24}{turn:>28}  closed form\n" in shown
    assert max(map(len, shown[shown.index("cycles  ") :].splitlines()[: len(names) + 2])) <= 80


def test_own_core_parameters_change_cycles_and_not_numbers(of_kind, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nbase: silicon\nclock_hz: 0.85e9\n")
    usual, _ = of_kind("dense")
    other = run(tmp_path / "mine", **on_wafer({"engine": {"cores": str(file)}}))
    assert usual[:2] == other[:2]
    cycles = other[2][0].cycles
    assert (cycles.cores, cycles.clock_hz) == (load_parameters(file).name, 0.85e9)
    assert cycles.closed_form > usual[2][0].cycles.closed_form


def test_layer_that_does_not_fit_the_cores_is_refused_before_anything_is_written(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(BudgetError) as refused:
        run(folder, engine={**WAFER, "mesh": "1x1"}, batch={"micro": 4})
    assert str(refused.value) == (
        "engine.mesh: stage transformer.h.0: 128 x 32 with 64 tokens on 1x1 cores needs 88,400 "
        "bytes per core (activations 81,920, sums 2,304, program 4,176), a core has 49,152; at "
        "most 34 tokens fit; give fewer tokens (a smaller batch.micro) or take a larger mesh"
    )
    assert not folder.exists()


def test_values_beyond_the_cores_memory_are_noticed(tmp_path):
    said = []
    trainer, _ = trainer_of(
        language_model("gpt2"), RECIPE, tmp_path, engine={**WAFER, "mesh": "2x2"}
    )
    trainer._listener = said.append
    trainer.train()
    texts = [event.text for event in said if isinstance(event, Notice)]
    [text] = [text for text in texts if text.startswith("engine.mesh")]
    assert "and 2x2 cores have room for 0.18 MiB. Every layer fits; cycles do not include" in text


def test_two_engines_work_side_by_side(of_kind):
    (one, _), (two, _) = of_kind("dense"), of_kind("two engines")
    ratio = one[2][0].cycles.closed_form / two[2][0].cycles.closed_form
    assert ratio == pytest.approx(2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"cluster": {"start": "local"}, "engine": WAFER},
            "engine.device: expected auto, cpu or cuda with cluster.start: local, got wafer: "
            "cycles are counted in the process that trains; set cluster.start to none",
        ),
        (
            {"engine": {**WAFER, "devices": ["cpu", "cpu"]}},
            "engine.device: expected auto with engine.devices: cpu ..., got wafer",
        ),
        (
            {"precision": "bf16", "engine": {**WAFER, "cycles": "simulated"}},
            "precision: expected fp32 with engine.cycles: simulated, got bf16: the simulated cores "
            "compute with 32-bit numbers; set engine.cycles to closed_form, or precision to fp32",
        ),
        (
            {"engine": {**WAFER, "mesh": "0x8"}},
            "engine.mesh: expected rows and columns from 1 up, such as 32x32, got '0x8', which "
            "has no cores",
        ),
        (
            {"engine": {**WAFER, "mesh": "8x0"}},
            "engine.mesh: expected rows and columns from 1 up, such as 32x32, got '8x0', which "
            "has no cores",
        ),
        (
            {"engine": {**WAFER, "mesh": 8}},
            "engine.mesh: expected rows and columns from 1 up, such as 32x32, got 8",
        ),
        (
            {"engine": {**WAFER, "mesh": "99999x99999"}},
            "engine.mesh: expected at most 10,000,000 cores, got 99999 x 99999 = 9,999,800,001; a "
            "CS-2 has 750 x 994",
        ),
        (
            {"engine": {**WAFER, "cores": "silicone"}},
            "engine.cores: expected core parameters, sim or silicon, or the path of a file that "
            "ends in .yaml, got 'silicone' (did you mean 'silicon'?)",
        ),
        (
            {"engine": {**WAFER, "cycles": "guessed"}},
            "engine.cycles: expected one of closed_form, simulated, got 'guessed'",
        ),
    ],
)
def test_options_that_cannot_be_used_are_refused(changes, text, tmp_path):
    with pytest.raises(ConfigError) as refused:
        run(tmp_path / "run", **changes)
    assert text in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_impossible_core_parameters_are_refused_with_the_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nsram_bytes: 0\n")
    with pytest.raises(ConfigError) as refused:
        run(tmp_path / "run", **on_wafer({"engine": {"cores": str(file)}}))
    assert str(refused.value).startswith(f"engine.cores: {file}:2: sram_bytes: ")


def test_most_cycles_of_a_wide_layer_are_those_of_its_products(of_kind):
    """A bound from elsewhere: a stage takes at least the cycles of its largest product alone."""
    found, _ = of_kind("dense")
    stage = found[3].program.stages[1]
    place = found[3].engines[0].wafer.kinds[stage.kind.digest]
    largest = StreamedProduct(128, 32, 32, is_indexed=False, element_bytes=4)
    one = forward(largest, place.layout, SIM).total
    assert cycles_of(found, stage.name, "forward")[0] > 4 * one
    assert torch.isfinite(torch.tensor(found[0])).all()
