"""Published cycle counts: what the closed forms say of the same programs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.wafer import (
    CS2_MESH,
    SILICON,
    SIM,
    SPARSE_ROWS,
    CompressedColumnsKernel,
    CoreParameters,
    Mesh,
    fit_sparse_kernel,
    published_rows,
    worst_ratio,
)
from penstock.wafer.closed_form import (
    PAID,
    PRODUCTS,
    StreamingOptions,
    acceleration_curve,
    all_reduce_cycles,
    line_broadcast_cycles,
    line_reduce_cycles,
    relay_cycles,
)
from penstock.wafer.parameters import figure_fields
from penstock.wafer.programs import simulate_tree_all_reduce

ROWS = published_rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}: {row.what}")
def test_published_row_is_met_within_15_percent(row):
    assert row.ratio == pytest.approx(1, abs=0.15)


def test_other_constants_miss_the_rows():
    # What the first set of parameters had: no set-up of vector operations, no conflicts of banks.
    bare = published_rows(CoreParameters("bare"), CompressedColumnsKernel(0.0))
    assert abs(math.log(worst_ratio(bare))) > 0.5
    assert worst_ratio(ROWS) == pytest.approx(1, abs=0.15)


def test_fitted_constants_are_those_of_the_rows_that_are_named():
    index, element = fit_sparse_kernel([row for row in SPARSE_ROWS if row.use == "fitted"])
    assert CompressedColumnsKernel().index_cycles == pytest.approx(index, rel=0.01)
    assert SIM.float_group_cycles == pytest.approx(element, rel=0.01)
    loops = {row.what: row for row in ROWS if row.group == "loop form"}
    assert loops["256 on 16, @map"].ratio == pytest.approx(1, abs=0.005)
    assert loops["256 on 16, while loop"].ratio == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize("left_out", range(len(SPARSE_ROWS)))
def test_each_sparse_row_is_met_by_constants_fitted_to_the_others(left_out):
    rest = [row for number, row in enumerate(SPARSE_ROWS) if number != left_out]
    index, element = fit_sparse_kernel(rest)
    row = SPARSE_ROWS[left_out]
    ours = (row.entries + row.columns) * index + row.entries * row.m * element
    assert ours == pytest.approx(row.mean, rel=0.15)


def test_fit_returns_the_constants_that_made_the_rows():
    made = [
        row.__class__(
            **{**vars(row), "mean": (row.entries + row.columns) * 30 + row.entries * row.m}
        )
        for row in SPARSE_ROWS
    ]
    assert fit_sparse_kernel(made) == pytest.approx((30, 1))


def test_extremes_of_cores_are_those_of_drawn_matrices():
    row, kernel = SPARSE_ROWS[1], CompressedColumnsKernel()
    random = np.random.default_rng(0)
    entries = random.binomial(row.rows * row.columns, row.density, (400, row.width * row.height))
    low, high = kernel.extremes(row, SIM)
    assert low == pytest.approx(kernel.cycles(row, SIM, entries.min(axis=1).mean()), rel=0.01)
    assert high == pytest.approx(kernel.cycles(row, SIM, entries.max(axis=1).mean()), rel=0.01)


def test_every_row_says_what_it_was_used_for():
    assert {row.use for row in ROWS} == {"fitted", "derived", "not fitted"}
    fitted = sum(row.use == "fitted" for row in ROWS)
    assert fitted == 5  # three sparse products and two loop forms, for four constants
    assert all(row.source for row in ROWS)


# --- collectives, by hand -------------------------------------------------------------------------

CORE = CoreParameters("x", vector_cycles=7.0, drain_cycles=9.0)


def test_relay_stores_all_words_in_every_core():
    assert relay_cycles(words=10, cores=3, core=CORE) == 4 * 16 + 30


def test_single_words_are_reduced_as_a_star_and_vectors_as_a_chain():
    # 7 words arrive over at most 7 hops; then up, down and one addition.
    assert line_reduce_cycles(8, 1, CORE) == line_reduce_cycles(8, 1, CORE, "star") == 7 + 5
    # Words pass, after 7 hops with an addition each.
    assert line_reduce_cycles(8, 1, CORE, "chain") == 1 + 7 + 35
    assert line_reduce_cycles(8, 1000, CORE) == 1000 + 7 + 35
    assert line_reduce_cycles(1, 1000, CORE) == 0


def test_star_of_a_vector_is_refused():
    with pytest.raises(ConfigError) as error:
        line_reduce_cycles(8, 2, CORE, "star")
    assert str(error.value) == (
        "words: expected 1 for a star, whose words mix on their way, got 2; take a chain"
    )


def test_broadcast_on_a_line_takes_words_and_hops():
    assert line_broadcast_cycles(8, 100, CORE) == 100 + 7 + 5
    assert line_broadcast_cycles(1, 100, CORE) == 0


def test_all_reduce_from_the_centre_takes_half_as_long():
    mesh = Mesh(500, 500)
    centre, corner = (all_reduce_cycles(mesh, CORE, root=root) for root in ("centre", "corner"))
    assert mesh.diameter < centre < 1.15 * mesh.diameter
    assert 2 * mesh.diameter < corner < 2.15 * mesh.diameter
    assert all_reduce_cycles(Mesh(1, 1), CORE) == 0


def test_all_reduce_by_chains_takes_a_ramp_twice_and_an_operation_at_every_core():
    mesh = Mesh(500, 500)
    stars, chains = (all_reduce_cycles(mesh, CORE, algorithm=name) for name in ("star", "chain"))
    # 250 cores of a row and 250 of a column; the middle of each adds its other side afterwards.
    assert chains - stars == pytest.approx(2 * 250 * 5, rel=0.01)


# --- the page of documentation --------------------------------------------------------------------

PAGE = (Path(__file__).parents[3] / "docs" / "wafer.md").read_text()


def _cells(first: str) -> list[str]:
    """Return the cells of the line of a table that begins with a text."""
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("name", figure_fields())
def test_page_has_the_value_and_the_source_of_every_parameter(name):
    _, sim, silicon, source = _cells(f"`{name}`")
    for text, core in ((sim, SIM), (silicon, SILICON)):
        value = {"yes": True, "no": False}.get(text)
        assert (float(text.replace(",", "")) if value is None else value) == getattr(core, name)
    assert source.startswith(SIM.sources[name])
    assert source.endswith(SILICON.sources[name])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.group}: {row.what}")
def test_page_has_every_published_row(row):
    _, published, ours, ratio, use = _cells(f"{row.group}: {row.what}")
    assert float(published.replace(",", "")) == pytest.approx(row.published, rel=1e-4)
    assert float(ours.replace(",", "")) == pytest.approx(row.modelled, rel=1e-3)
    assert (ratio, use) == (f"{row.ratio:.3f}", row.use)


def test_page_has_the_acceleration_that_is_computed():
    curves = [
        acceleration_curve(
            12288,
            12288,
            131072,
            CS2_MESH,
            SIM,
            sparsities=(0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999),
            products=("forward",),
            layout=rule,
        )
        for rule in ("plain", "best")
    ]
    for plain, best in zip(*curves, strict=True):
        _, ideal, ours, _, chosen, _ = _cells(f"{100 * plain.sparsity:.3g} %")
        assert float(ideal) == pytest.approx(plain.ideal)
        assert float(ours) == pytest.approx(plain.acceleration, rel=0.005)
        assert float(chosen) == pytest.approx(best.acceleration, rel=0.005)


@pytest.mark.parametrize(
    ("options", "begin"), [(StreamingOptions(sums="paid"), '(`sums="paid"`)'), (PAID, "(`PAID`)")]
)
@pytest.mark.parametrize(
    ("text", "layout"),
    [
        (r"the plain layout gains (\S+)(?: at 90 %)? and (\d+\.\d)", "plain"),
        (r"the best\s+layouts gain (\S+)\s+and (\d+\.\d)", "best"),
    ],
)
def test_page_has_the_acceleration_with_paid_sums(text, layout, options, begin):
    found = re.search(text, PAGE[PAGE.index(begin, PAGE.index("## Acceleration")) :]).groups()
    curve = acceleration_curve(
        *(12288, 12288, 131072, CS2_MESH, SIM),
        sparsities=(0.9, 0.99),
        products=("forward",),
        layout=layout,
        options=options,
    )
    assert [float(value) for value in found] == [round(point.acceleration, 1) for point in curve]


@pytest.mark.parametrize(
    ("text", "products"),
    [(r"two dense ones: (\S+) at 90 %", ("forward",)), (r"it gains (\S+), because", PRODUCTS)],
)
def test_page_has_the_acceleration_of_sixteen_engines(text, products):
    [found] = re.findall(text, PAGE)
    [point] = acceleration_curve(
        *(12288, 12288, 131072, CS2_MESH, SIM),
        sparsities=(0.9,),
        products=products,
        layout="best",
        engines=16,
    )
    assert float(found) == round(point.acceleration, 1)
    [share] = re.findall(r"binds the dense layer at (\d+) %", PAGE)
    assert int(share) == round(100 * point.dense[0].utilization)


@pytest.mark.parametrize("core", [SIM, SILICON], ids=lambda core: core.name)
@pytest.mark.parametrize("root", ["centre", "corner"])
@pytest.mark.parametrize(("algorithm", "words"), [("star", 1), ("chain", 1), ("chain", 30)])
def test_page_says_how_near_programs_of_an_all_reduce_come_to_the_closed_form(
    core, root, algorithm, words
):
    [(share, cycles, most)] = re.findall(
        r"within (\d+) %\s+from (\d+) cycles on\. Below \d+ cycles, .* at most (\d+) cycles", PAGE
    )
    for sides in ((1, 2), (1, 3), (3, 3), (2, 5), (8, 9), (60, 1), (20, 21)):
        mesh = Mesh(*sides)
        values = np.ones((mesh.cores, words), np.float32)
        _, report = simulate_tree_all_reduce(values, mesh, core, root, algorithm)
        found = all_reduce_cycles(mesh, core, words, root=root, algorithm=algorithm)
        within = int(share) / 100 * report.cycles if report.cycles >= int(cycles) else int(most)
        assert abs(found - report.cycles) <= within, mesh


def test_example_of_the_page_prints_what_the_page_says(capsys):
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(example, {})
    assert f"# {capsys.readouterr().out.strip()}" == example.strip().splitlines()[-1]
