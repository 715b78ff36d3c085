"""The choice of products: its record, and that it is measured."""

from __future__ import annotations

import json
import math

import pytest
import torch

from penstock.errors import ConfigError
from penstock.sparsity import (
    Choice,
    DenseTiles,
    SparseKernel,
    choose_product,
    product_measurement,
    product_memory,
)
from penstock.sparsity.product_choice import PRODUCTS

CHOICE = Choice(SparseKernel(96), SparseKernel(192, 40, 128, "dots"), DenseTiles(256))
KERNEL = {
    "way": "sparse",
    "block_columns": 16,
    "band_rows": None,
    "panel_tokens": 64,
    "bfloat16": "dots",
}


def test_a_choice_comes_back_from_its_record():
    record = json.loads(json.dumps(CHOICE.as_record()))
    assert Choice.from_record(record) == CHOICE
    assert record["input_gradient"] == {
        "way": "sparse",
        "block_columns": 192,
        "band_rows": 40,
        "panel_tokens": 128,
        "bfloat16": "dots",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"forward": {"way": "guessed"}},
        {"forward": {"way": "sparse"}},
        {"forward": None},
        {"forward": {"way": "sparse", "block_columns": "many"}},
        {"forward": KERNEL | {"bfloat16": "quads"}},
        {"forward": KERNEL | {"block_columns": True}},
        {"forward": {name: KERNEL[name] for name in KERNEL if name != "panel_tokens"}},
        {"forward": {name: KERNEL[name] for name in KERNEL if name != "bfloat16"}},
        {"forward": KERNEL | {"unroll": 4}},
        {"forward": KERNEL | {"block_columns": 0}},
        {"forward": KERNEL | {"block_columns": 65537}},
        {"forward": KERNEL | {"band_rows": -1}},
        {"forward": KERNEL | {"panel_tokens": 7}},
        {"forward": KERNEL | {"panel_tokens": 1 << 40}},
        {"forward": {"way": "dense tiles", "band_rows": 0}},
        {"forward": {"way": "dense tiles", "band_rows": None}},
        {"panel_tokens": 128},
    ],
)
def test_a_record_of_something_else_is_refused(change):
    with pytest.raises(ConfigError, match=r"sparse products: expected the record of a choice"):
        Choice.from_record(CHOICE.as_record() | change)


def test_a_record_of_the_former_format_is_refused():
    """One size of panel for all products: its kernels would get the present defaults."""
    former = {"way": "sparse", "block_columns": 16, "band_rows": None}
    record = {"panel_tokens": 128, "bfloat16": "dots"} | dict.fromkeys(PRODUCTS, former)
    with pytest.raises(ConfigError, match="resume the run with the version of Penstock"):
        Choice.from_record(record)


def test_a_record_that_lacks_something_is_refused():
    record = CHOICE.as_record()
    del record["weight_gradient"]
    with pytest.raises(ConfigError, match="weight_gradient"):
        Choice.from_record(record)


@pytest.fixture
def clock(monkeypatch):
    """A clock that products move on, as if 48 columns and panels of 64 tokens were best.

    Its second number is the best band of rows.
    """
    now = [0.0, 64]

    def run(case, name, choice):
        product = getattr(choice, name)
        if isinstance(product, DenseTiles):
            now[0] += 1.0
        else:
            blocks, panels = abs(product.block_columns - 48), abs(product.panel_tokens - 64)
            now[0] += 0.1 + blocks + panels / 100 + abs(product.band_rows - now[1]) / 1e4

    product_measurement._measured.cache_clear()
    monkeypatch.setattr(product_measurement._Case, "run", run)
    monkeypatch.setattr(product_measurement.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(product_measurement, "cache_bytes", lambda: (24576, 1 << 18))
    yield now
    product_measurement._measured.cache_clear()


def test_the_fastest_way_is_chosen(clock):
    # Panels of 64 tokens of 4 bytes: 48 columns are half of the first cache, 64 rows a band.
    choice = choose_product((100, 300), torch.float32, 0.5, 1000)
    assert choice == Choice(*3 * [SparseKernel(48, 64)])


@pytest.mark.parametrize(
    ("most_tokens", "panels"), [(128, (64, 128)), (512, (128, 256)), (32, (128, 256))]
)
def test_sums_are_measured_with_panels_that_interleave_rows(monkeypatch, most_tokens, panels):
    monkeypatch.setattr(
        product_measurement, "interleaved_rows", lambda tokens: 1 + (tokens <= most_tokens)
    )
    case = product_measurement._Case((64, 64), torch.bfloat16, 0.9, 256)
    assert case.panels("forward") == case.panels("input_gradient") == panels
    assert case.panels("weight_gradient") == (128, 256)


@pytest.mark.parametrize(
    ("band", "outputs", "inputs"), [(64, 64, 64), (128, 128, 128), (900, 600, 300)]
)
def test_the_fastest_blocks_are_measured_with_every_band(clock, band, outputs, inputs):
    """The largest band has all outputs, which are the inputs for their gradient."""
    clock[1] = band
    choice = choose_product((600, 300), torch.float32, 0.5, 1000)
    expected = SparseKernel(48, outputs)
    assert choice == Choice(expected, SparseKernel(48, inputs), expected)


def test_a_kernel_that_another_band_makes_the_fastest_is_found(monkeypatch):
    """Three dense tiles are faster than every kernel with the smallest band, and others slower
    than one with all rows."""

    now = [0.0]

    def run(case, name, choice):
        product = getattr(choice, name)
        if isinstance(product, DenseTiles):
            now[0] += 1.0
        else:
            now[0] += 0.7 if product.band_rows == 2048 else 1.5 + product.block_columns / 1e4

    product_measurement._measured.cache_clear()
    monkeypatch.setattr(product_measurement._Case, "run", run)
    monkeypatch.setattr(product_measurement.time, "perf_counter", lambda: now[0])
    choice = choose_product((2048, 2048), torch.float32, 0.9, 1024)
    assert [product.band_rows for product in (choice.forward, choice.weight_gradient)] == [2048] * 2
    product_measurement._measured.cache_clear()


@pytest.mark.parametrize(("sparsity", "widest"), [(0.99, 1024), (0.9, 384)])
def test_rows_of_few_entries_are_measured_with_a_block_of_half_the_second_cache(
    monkeypatch, sparsity, widest
):
    monkeypatch.setattr(product_measurement, "cache_bytes", lambda: (48 << 10, 512 << 10))
    case = product_measurement._Case((16, 4096), torch.float32, sparsity, 64)

    assert max(case.blocks("forward", 64)) == widest


@pytest.mark.parametrize(("columns", "widest"), [(2048, 2048), (8192, 1024)])
def test_a_block_covers_the_measured_part_only_if_it_covers_the_weight(
    monkeypatch, columns, widest
):
    monkeypatch.setattr(product_measurement, "cache_bytes", lambda: (48 << 10, 4 << 20))
    for name, shape in (("forward", (16, columns)), ("input_gradient", (columns, 16))):
        case = product_measurement._Case(shape, torch.float32, 0.99, 64)
        assert max(case.blocks(name, 64)) == widest


def test_a_dense_product_that_is_faster_is_chosen(clock, monkeypatch):
    monkeypatch.setattr(product_measurement, "cache_bytes", lambda: (1 << 20, 1 << 22))
    choice = choose_product((100, 300), torch.float32, 0.5, 1000)
    assert isinstance(choice.forward, DenseTiles)


def test_a_choice_is_measured_once(clock):
    first = choose_product((100, 300), torch.float32, 0.5, 1000)
    then = clock[0]
    assert choose_product((100, 300), torch.float32, 0.5, 1000) is first
    assert clock[0] == then


def test_a_choice_of_this_machine_is_one_that_products_take():
    choice = choose_product((48, 64), torch.float32, 0.9, 40)
    ways = (choice.forward, choice.input_gradient, choice.weight_gradient)
    assert all(way.panel_tokens == 32 for way in ways if isinstance(way, SparseKernel))
    assert Choice.from_record(choice.as_record()) == choice


@pytest.mark.parametrize(
    ("shape", "forward", "input_gradient"),
    [
        ((32, 32), [32], [32]),  # measured as a whole
        ((64, 128), [16, 64], [16]),  # all rows are one band, all columns are not
        ((100, 40), [16, 20], [20, 40]),
        ((4096, 4096), [16], [16]),
    ],
)
def test_a_band_of_a_tile_covers_the_measured_part_only_if_it_covers_the_weight(
    shape, forward, input_gradient, monkeypatch
):
    monkeypatch.setattr(product_measurement, "_MOST_FEATURES", 32)
    for module in (product_measurement, product_memory):
        monkeypatch.setattr(module, "TILE_BYTES", (16 * 128 * 4, 64 * 128 * 4))
    case = product_measurement._Case(shape, torch.float32, 0.5, 8)
    planned = product_memory.tile_bytes(math.prod(shape), sum(shape), torch.float32)
    for name, expected in (("forward", forward), ("input_gradient", input_gradient)):
        bands = [tiles.band_rows for tiles in case.dense_tiles(name)]
        assert bands == expected
        inputs = shape[1] if name == "forward" else shape[0]
        assert max(bands) * inputs * 4 <= planned


def test_measurements_keep_no_orders(monkeypatch):
    layouts = []
    products = product_measurement._Case.run

    def run(case, name, choice):
        layouts.append(case.layout)
        products(case, name, choice)
        assert len(case.layout._blocked) <= 1

    product_measurement._measured.cache_clear()
    monkeypatch.setattr(product_measurement._Case, "run", run)
    choose_product((48, 64), torch.float32, 0.9, 40)
    product_measurement._measured.cache_clear()
    assert not layouts[-1]._blocked


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, float("nan")])
def test_a_sparsity_out_of_range_is_refused(sparsity):
    with pytest.raises(ValueError, match="a sparsity from 0 to below 1"):
        choose_product((8, 8), torch.float32, sparsity, 10)


def test_a_type_without_products_is_refused():
    with pytest.raises(ValueError, match=r"dtype: expected float32 or bfloat16, got torch.float16"):
        choose_product((8, 8), torch.float16, 0.5, 10)


def test_caches_are_read_from_the_system(tmp_path):
    for index, (kind, level, size) in enumerate(
        [("Data", 1, "48K"), ("Instruction", 1, "32K"), ("Unified", 2, "2048K")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("type", kind), ("level", level), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    assert product_measurement.cache_bytes(tmp_path) == (48 << 10, 2 << 20)
    assert product_measurement.cache_bytes(tmp_path / "nothing") == (32 << 10, 1 << 20)
