"""`penstock wafer`: cycles of products and stages, pictures, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.errors import BudgetError, ConfigError
from penstock.wafer import SILICON, SIM, Mesh
from penstock.wafer.closed_form import ActivationLayout, StreamedProduct, choose_layout, step_cycles
from penstock.wafer_figures import FIGURES

TINY = str(Path(__file__).resolve().parents[3] / "recipes" / "tiny.yaml")
LAYER = ["--outputs", "96", "--inputs", "64", "--tokens", "48", "--mesh", "4x6"]
WIDE = ["--outputs", "8192", "--inputs", "8192"]
PLAIN = ActivationLayout(Mesh(4, 6))


def wafer(*arguments):
    return CliRunner().invoke(app, ["wafer", *map(str, arguments)])


def refused(*arguments):
    error = wafer(*arguments).exception
    assert isinstance(error, ConfigError | BudgetError), error
    return str(error)


@pytest.mark.parametrize("density", [1.0, 0.1])
@pytest.mark.parametrize("core", [SIM, SILICON], ids=lambda core: core.name)
def test_product_prints_the_closed_form_of_the_best_layout(density, core):
    result = wafer("product", *LAYER, "--density", density, "--cores", core.name, "--json")
    found = json.loads(result.stdout)
    streamed = StreamedProduct(96, 64, 48, density, is_indexed=density < 1)
    layout = choose_layout(streamed, Mesh(4, 6), core).layout
    assert found["products"] == [part.as_dict() for part in step_cycles(streamed, layout, core)]
    assert (found["source"], found["layout"], found["simulated"]) == (
        "closed form",
        str(layout),
        [],
    )


def test_table_of_a_product_says_what_it_is_in_80_columns():
    lines = wafer("product", *LAYER, "--density", 0.1, "--layout", "plain").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "90% sparse 96 x 64 with 48 tokens, 2 bytes each"
    assert lines[1] == "4x6 cores (sim), 1.1 GHz; closed form"
    assert lines[2] == "layout: tokens over 6 columns, features over 4 rows"
    parts = step_cycles(StreamedProduct(96, 64, 48, 0.1), PLAIN, SIM)
    cells = {line[:24].strip(): line.split()[-3:] for line in lines[4:]}
    assert cells["cycles"] == [f"{part.total:,.0f}" for part in parts]
    assert cells["skew"] == [f"{part.skew:,.0f}" for part in parts]
    assert lines[4].split() == ["forward", "data", "gradient", "weight", "gradient"]


@pytest.mark.parametrize("mesh", ["750x994", "1000x10"])
def test_table_of_a_large_product_keeps_to_80_columns(mesh):
    arguments = ["--outputs", "49152", "--inputs", "12288", "--tokens", "131072", "--mesh", mesh]
    for density in (1, 0.01):
        result = wafer("product", *arguments, "--density", density)
        if result.exception is None or isinstance(result.exception, SystemExit):
            assert max(map(len, result.stdout.splitlines())) <= 80
        else:
            assert isinstance(result.exception, BudgetError)


def test_simulated_products_are_near_the_closed_form_for_the_same_mask():
    result = wafer("product", *LAYER, "--density", 0.3, "--simulate", "--json")
    found = json.loads(result.stdout)["simulated"]
    assert [one["name"] for one in found] == ["forward", "data gradient", "weight gradient"]
    for one in found:
        assert one["busy"] + one["starved"] + one["blocked"] == pytest.approx(1)
        assert one["simulated cycles"] == pytest.approx(one["closed form cycles"], rel=0.1)
        assert 1 <= one["greatest queue"] <= SIM.queue_words
    page = wafer("product", *LAYER, "--density", 0.3, "--simulate").stdout
    cycles = found[0]["simulated cycles"]
    assert f"forward{cycles:>24,.0f}" in page
    above, here = page.split("\nclosed form: here of the drawn entries, in the table above of the ")
    parts = step_cycles(StreamedProduct(96, 64, 48, 0.3), PLAIN, SIM)
    expected = [f"{part.total:,.0f}" for part in parts]
    assert (
        next(line.split()[1:] for line in above.splitlines() if line[:7] == "cycles ") == expected
    )
    forms = [f"{one['closed form cycles']:,.0f}" for one in found]
    assert [line.split()[-5] for line in here.splitlines()[2:]] == forms != expected
    assert max(map(len, page.splitlines())) <= 80


def test_stages_of_a_program_are_printed_by_kind():
    arguments = ["layers", TINY, "model.n_layer=2", "--mesh", "32x32", "--micro-batch", "2"]
    found = json.loads(wafer(*arguments, "--json").stdout)
    assert (found["mesh"], found["cores"], found["source"]) == ("32x32", "sim", "closed form")
    assert [row["stages"] for row in found["kinds"]] == [1, 2, 1]
    assert [list(row["cycles"]) for row in found["kinds"]] == [
        ["forward", "backward"],
        ["forward", "backward"],
        ["turn"],
    ]
    for row in found["kinds"]:
        assert row["tokens"] == 256
        assert sum(row["by_work"].values()) == pytest.approx(sum(row["cycles"].values()))
    total = sum(row["stages"] * sum(row["cycles"].values()) for row in found["kinds"])
    page = wafer(*arguments).stdout
    assert f"\nall 4 stages: {total:,.0f} cycles, {1e3 * total / 1.1e9:.3g} ms at 1.1 GHz\n" in page
    assert "32x32 cores (sim), 1.1 GHz; closed form\n" in page
    assert max(map(len, page.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["product", *LAYER, "--mesh", "0x6"],
            "--mesh: expected rows from 1 up, got 0; a CS-2 has 750 rows and 994 columns, for "
            "example mesh: 750x994",
        ),
        (
            ["product", *LAYER, "--mesh", "32"],
            "--mesh: expected rows and columns such as 32x32, got '32'; a CS-2 has 750x994",
        ),
        (
            ["product", *LAYER, "--cores", "silicone"],
            "--cores: expected core parameters, sim or silicon, or the path of a file that ends in "
            ".yaml, got 'silicone' (did you mean 'silicon'?)",
        ),
        (
            ["product", *LAYER, "--bytes", "3"],
            "--bytes: expected 2 or 4, got 3",
        ),
        (
            ["product", *LAYER, "--density", "1e-4"],
            "--density: expected at least one kept entry of 6,144, got 0.0001, which keeps less "
            "than one",
        ),
        (
            ["product", *LAYER, "--tokens", "0"],
            "product: expected tokens from 1 up, got 0",
        ),
        (
            ["product", *LAYER, "--inputs", "100000000"],
            "product: expected at most 4,194,304 inputs, got 100,000,000",
        ),
        (
            ["product", *LAYER, "--mesh", "9999x9999"],
            "--mesh: expected at most 10,000,000 cores, got 9999 x 9999 = 99,980,001; a CS-2 has "
            "750 x 994",
        ),
        (
            ["layers", TINY, "--mesh", "32x"],
            "--mesh: expected rows and columns such as 32x32, got '32x'; a CS-2 has 750x994",
        ),
        (
            ["product", *LAYER, "--mesh", "1x1", "--tokens", "4096", "--layout", "plain"],
            "layer: 96 x 64 with 4096 tokens on 1x1 cores needs 2,699,344 bytes per core "
            "(activations 2,621,440, sums 73,728, program 4,176), a core has 49,152; at most 68 "
            "tokens fit; give fewer tokens (a smaller batch.micro) or take a larger mesh",
        ),
        (
            ["product", *LAYER, *WIDE, "--mesh", "64x64", "--tokens", "64", "--simulate"],
            "--simulate: expected at most 100,000,000 entries that arrive at cores, got "
            "4,294,967,296 (67,108,864 entries in 64 columns of cores); give a smaller layer or "
            "mesh, or leave --simulate out",
        ),
        (
            ["figure", "acelleration"],
            f"expected a figure, one of {', '.join(FIGURES)}, got 'acelleration' (did you mean "
            "'acceleration'?)",
        ),
        (
            ["figure", "ring", "--cores", "gold"],
            "--cores: expected core parameters, sim or silicon, or the path of a file that ends in "
            ".yaml, got 'gold'",
        ),
        (
            ["figure", "ring", "--out", "ring.pdf"],
            "ring.pdf: expected a name that ends in .png or .svg, got '.pdf'",
        ),
        (
            ["figure", "animation", "--out", "a.png"],
            "a.png: expected a name that ends in .gif, got '.png'",
        ),
    ],
)
def test_bad_input_is_refused(arguments, text):
    assert refused(*arguments) == text


def test_density_without_entries_is_refused():
    assert "density" in refused("product", *LAYER, "--density", 0)
    assert "density" in refused("product", *LAYER, "--density", 1.5)


def test_impossible_core_file_is_refused_line_by_line(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nsimd_half: 0\nword_cycles: 0.5\n")
    assert refused("product", *LAYER, "--cores", file) == (
        f"--cores: {file}:2: simd_half: expected a whole number from 1 up (multiply-adds per "
        "cycle), got 0\n"
        f"{file}:3: word_cycles: expected a number from 1 up (cycles), got 0.5"
    )


def test_stage_that_does_not_fit_is_refused_by_name():
    text = refused("layers", TINY, "--mesh", "1x1")
    assert text.startswith("engine.mesh: stage transformer.h.0: 256 x 64 with 128 tokens on 1x1")


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_picture_is_written_and_says_where_its_numbers_come_from(ending, tmp_path):
    path = tmp_path / f"accumulators{ending}"
    result = wafer("figure", "accumulators", "--out", path)
    assert result.stdout == (
        f"{path}: cycles over the unsent sums that a core may hold; closed form\n"
    )
    again = tmp_path / f"again{ending}"
    wafer("figure", "accumulators", "--out", again)
    assert path.read_bytes() == again.read_bytes()
    assert path.stat().st_size > 5000
