"""The library of known machines: figures, their sources, and the page that shows both."""

import re
from pathlib import Path
from typing import get_args

import pytest

from penstock.config import ByteSize
from penstock.machines import RateCurve, RateTable, Work, known_machines, load_machine
from penstock.machines.figures import figure_keys, figures
from penstock.machines.reference import markdown

ROOT = Path(__file__).resolve().parents[3]
BASES = ("published", "measured", "derived", "assumed", "unknown")


def test_library_has_the_documented_machines():
    expected = ["cs2", "cs3", "h100", "h200", "hosts-100g", "hosts-10g", "hosts-25g"]
    assert known_machines() == expected
    assert [load_machine(name).name for name in expected] == expected


@pytest.mark.parametrize("name", known_machines())
def test_every_figure_of_a_library_machine_has_a_source_with_its_basis(name):
    machine = load_machine(name)
    has = figures(machine)
    defaults = {"engine.stage_seconds", "link.seconds"}
    without = [key for key, text in has.items() if key not in machine.sources]
    assert [key for key in without if key not in defaults or not has[key].startswith("0 ")] == []
    assert [key for key in machine.sources if key not in figure_keys(machine)] == []
    for key, source in machine.sources.items():
        basis, _, text = source.partition(": ")
        assert basis in BASES, key
        assert (basis == "unknown") <= (key not in has), f"{key} has a value"
        assert len(text) > 10, f"{key} needs more than its basis"


@pytest.mark.parametrize("name", known_machines())
def test_every_rate_curve_of_a_library_machine_has_a_source(name):
    machine = load_machine(name)
    parts = {"engine.rates": machine.engine.rates, "store.rates": machine.store.rates}
    if machine.store.flash is not None:
        parts["store.flash.rates"] = machine.store.flash.rates
    for part, curves in parts.items():
        for curve in curves:
            dtype = "" if curve.dtype == "any" else f".{curve.dtype}"
            assert f"{part}.{curve.work}{dtype}" in machine.sources


@pytest.mark.parametrize("name", known_machines())
def test_library_machine_claims_no_accuracy_and_has_both_types(name):
    machine = load_machine(name)
    assert machine.accuracy is None
    for dtype in ("float32", "bfloat16"):
        assert machine.engine.speed.curve("product", dtype).dtype == dtype


def peak(machine, work, dtype):
    return max(machine.engine.speed.curve(work, dtype).rates)


def test_cs2_has_the_published_figures():
    machine = load_machine("cs2")
    assert (machine.engine.most, machine.engine.memory) == (192, 40 * 10**9)
    assert machine.store.memory == 2_400 * 10**12
    assert machine.store.memory == 20 * 120e12  # 120 T parameters of 20 bytes
    assert machine.link.weights == machine.link.gradients == 12 * 100e9 / 8
    assert (machine.link.fan_out, machine.link.value_bytes) == (4, 4)
    assert peak(machine, "product", "bfloat16") == 0.5 * 7.5e15
    assert peak(machine, "product", "bfloat16") == 4 * peak(machine, "product", "float32")
    assert machine.store.speed.curve("update").at(1) == 4e12


def test_cs3_is_twice_a_cs2_with_the_same_link():
    old, new = load_machine("cs2"), load_machine("cs3")
    for dtype in ("float32", "bfloat16"):
        assert peak(new, "product", dtype) == 2 * peak(old, "product", dtype)
    assert new.link == old.link
    assert new.engine.watts == old.engine.watts


def test_sparse_products_of_a_wafer_gain_less_than_they_skip():
    curve = load_machine("cs2").engine.speed.curve("sparse product", "bfloat16")
    dense = 3.75e15
    speedup = [curve.at(kept) / dense / kept for kept in (0.5, 0.1, 0.05, 0.01)]
    assert speedup == pytest.approx([1.8, 6.0, 9.1, 28], rel=0.01)


@pytest.mark.parametrize(("name", "bytes_per_second"), [("h100", 3.0e12), ("h200", 4.29e12)])
def test_small_products_of_a_gpu_are_limited_by_its_memory(name, bytes_per_second):
    machine = load_machine(name)
    assert machine.engine.speed.curve("pointwise").at(1e9) == bytes_per_second
    for dtype, width in (("bfloat16", 2), ("float32", 4)):
        curve = machine.engine.speed.curve("product", dtype)
        # A product of smallest dimension s does 2 s FLOP for each value of its largest matrix.
        for size in curve.sizes:
            limit = 2 * size / width * bytes_per_second
            assert curve.at(size) == pytest.approx(limit, rel=2e-3)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_expanded_sparse_weights_of_a_gpu_take_the_time_of_dense_ones(name):
    speed = load_machine(name).engine.speed
    for dtype in ("bfloat16", "float32"):
        dense = max(speed.curve("product", dtype).rates)
        for kept in (0.01, 0.1, 0.5, 1.0):
            rate = speed.curve("sparse product", dtype).at(kept)
            assert kept / rate == pytest.approx(1 / dense)


def test_eight_gpus_take_what_the_host_sends():
    for name in ("h100", "h200"):
        machine = load_machine(name)
        assert machine.engine.most * machine.link.weights == machine.link.store


@pytest.mark.parametrize("gigabits", [10, 25, 100])
def test_hosts_differ_by_their_link_alone(gigabits):
    base, machine = load_machine("hosts-10g"), load_machine(f"hosts-{gigabits}g")
    assert machine.engine == base.engine
    assert machine.store == base.store
    payload = 1448 / 1538  # TCP with time stamps in frames of 1500 bytes
    assert machine.link.weights == pytest.approx(gigabits * 1e9 / 8 * payload, rel=1e-3)
    assert machine.link.store == pytest.approx(4 * machine.link.weights, rel=1e-3)


def test_figures_are_written_with_their_units():
    text = figures(load_machine("h100"))
    assert text["engine.rates.product.bfloat16"] == "48 TFLOP/s at 16, 720 TFLOP/s at 240"
    assert text["engine.rates.pointwise"] == "3 TB/s"
    assert text["engine.memory"] == "80 GB"
    assert text["engine.operator_seconds"] == "5e-06 s"
    assert text["store.flash.size"] == "30,720 GB"
    assert text["link.weights"] == "55 GB/s"
    assert text["engine.price"] == "4.916 USD/hour"
    assert figures(load_machine("hosts-10g"))["engine.memory"] == "192GiB"


def test_figures_name_the_layout_of_a_curve():
    machine = load_machine("hosts-10g")
    curve = RateCurve(work="product", dtype="float32", layout="tokens", rates=(2e9,))
    rates = (*machine.engine.rates, curve)
    engine = machine.engine.model_copy(update={"rates": rates, "memory": ByteSize(1 << 30)})
    text = figures(machine.model_copy(update={"engine": engine}))
    assert text["engine.rates.product.float32.tokens"] == "2 GFLOP/s"


def test_page_of_machines_matches_the_code_and_the_library():
    page = (ROOT / "docs" / "machines.md").read_text()
    assert page == markdown(), "run: python -m penstock.machines.reference > docs/machines.md"
    for name in known_machines():
        assert f"\n### {name}\n" in page


def test_page_shows_every_figure_and_every_source():
    page = (ROOT / "docs" / "machines.md").read_text()
    for name in known_machines():
        section = page.split(f"\n### {name}\n")[1].split("\n### ")[0]
        machine = load_machine(name)
        rows = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section, re.MULTILINE))
        assert rows.keys() == machine.sources.keys()
        values = figures(machine)
        assert rows == {key: values.get(key, "null") for key in machine.sources}


def test_page_names_the_work_that_stands_in_for_other_work():
    page = (ROOT / "docs" / "machines.md").read_text().split("## Curves")[1].split("## The")[0]
    rows = re.findall(
        r"^\| (`[a-z`, ]+`) \| [^|]*/s[^|]* \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE
    )
    said = {work.strip("`"): text for works, text in rows for work in works.split(", ")}
    assert set(said) == set(get_args(Work))
    for work, text in said.items():
        stand_in = text.split("`")[1] if "`" in text else None
        needed = [RateCurve(work=w, rates=(1.0,)) for w in ("product", "pointwise", "update")]
        if stand_in is None:
            assert text.startswith("required")
        else:
            assert RateTable(needed, "it").curve(work).work == stand_in


def test_example_of_the_page_is_a_machine(tmp_path):
    page = (ROOT / "docs" / "machines.md").read_text()
    (tmp_path / "rack.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    machine = load_machine(tmp_path / "rack.yaml")
    assert machine.name == "rack"
    assert set(machine.sources) <= set(figure_keys(machine))
