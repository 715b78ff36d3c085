"""Layouts of activations: their sizes, their choice, and the memory they need."""

from __future__ import annotations

import pytest

from penstock.errors import BudgetError, ConfigError
from penstock.wafer import CS2_MESH, SIM, Mesh
from penstock.wafer.closed_form import (
    ActivationLayout,
    StreamedProduct,
    StreamingOptions,
    candidate_layouts,
    check_fits,
    choose_layout,
    forward,
    most_tokens,
    sram_use,
    step_cycles,
    weight_gradient,
)


def test_plain_layout_divides_tokens_over_columns_and_features_over_rows():
    layout = ActivationLayout(Mesh(6, 8))
    assert (layout.feature_rows, layout.token_columns) == (6, 8)
    assert (layout.features(13), layout.tokens(65)) == (3, 9)
    turned = ActivationLayout(Mesh(6, 8), "rows")
    assert (turned.feature_rows, turned.token_columns) == (8, 6)
    assert str(layout) == "tokens over 8 columns, features over 6 rows"
    assert str(turned) == "tokens over 6 rows, features over 8 columns"


def test_groups_move_cores_from_one_division_to_the_other():
    columns = ActivationLayout(Mesh(6, 8), column_groups=2)
    assert (columns.feature_rows, columns.token_columns, columns.chain_rows) == (12, 4, 6)
    rows = ActivationLayout(Mesh(6, 8), row_groups=2)
    assert (rows.feature_rows, rows.token_columns, rows.chain_rows) == (3, 16, 3)
    assert str(rows) == "tokens over 16, features over 3 parts, 2 groups"


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_links_of_a_row_of_cores_carry_the_entries_of_all_column_groups(groups):
    layout = ActivationLayout(Mesh(6, 8), column_groups=groups)
    product = StreamedProduct(10, 48, 64, element_bytes=2)  # each row of cores has 8 features
    ahead = forward(product, layout, SIM).limits
    # One word for each of 10 x 8 entries, and one control word for each output feature.
    assert ahead["words at the edge"] == pytest.approx(10 * 8 + 10)
    assert weight_gradient(product, layout, SIM).limits["gradients on links"] == pytest.approx(80)


@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(3, 40), CS2_MESH], ids=str)
def test_no_candidate_uses_more_cores_than_there_are(mesh):
    found = list(candidate_layouts(mesh))
    assert found[0] == ActivationLayout(mesh)
    assert len(set(found)) == len(found)
    assert all(0 < one.feature_rows * one.token_columns <= mesh.cores for one in found)


def test_long_sequences_of_narrow_layers_divide_tokens_further():
    narrow = choose_layout(StreamedProduct(256, 256, 65536, 0.1), Mesh(64, 64), SIM)
    assert narrow.layout.feature_rows < 64


def test_short_sequences_of_wide_layers_divide_features_further():
    wide = choose_layout(StreamedProduct(4096, 4096, 256), Mesh(64, 64), SIM)
    assert wide.layout.feature_rows > 64


def test_chosen_layout_is_the_fastest_of_those_that_fit():
    product, mesh = StreamedProduct(512, 512, 4096, 0.1), Mesh(32, 16)
    choice = choose_layout(product, mesh, SIM)
    fitting = [layout for layout in candidate_layouts(mesh) if sram_use(product, layout, SIM).fits]
    assert choice.considered == len(fitting)
    times = [sum(part.total for part in step_cycles(product, one, SIM)) for one in fitting]
    assert choice.cycles == min(times)
    ahead = choose_layout(product, mesh, SIM, is_training=False)
    assert ahead.cycles == min(
        forward(product, one, SIM).total
        for one in candidate_layouts(mesh)
        if sram_use(product, one, SIM, is_training=False).fits
    )


def test_memory_of_a_core_by_hand():
    product = StreamedProduct(outputs=100, inputs=60, tokens=64)
    use = sram_use(product, ActivationLayout(Mesh(10, 8)), SIM, StreamingOptions(accumulators=3))
    # 8 tokens of 2 bytes; 6 and 10 features with their gradients; 8 rows of a broadcast.
    assert (use.inputs, use.outputs, use.sums) == (2 * 6 * 16, 2 * 10 * 16, 8 * 16)
    assert use.total == 192 + 320 + 128 + 4176
    ahead = sram_use(
        product, ActivationLayout(Mesh(10, 8)), SIM, StreamingOptions(), is_training=False
    )
    assert (ahead.inputs, ahead.outputs, ahead.sums) == (6 * 16, 10 * 16, 9 * 16)


def test_layer_that_does_not_fit_is_refused_with_the_tokens_that_would():
    product, layout = StreamedProduct(4096, 1024, 4096), ActivationLayout(Mesh(32, 32))
    with pytest.raises(BudgetError) as error:
        check_fits(product, layout, SIM, name="transformer.h.0.mlp")
    assert str(error.value) == (
        "transformer.h.0.mlp: 4096 x 1024 with 4096 tokens on 32x32 cores needs 88,400 bytes per "
        "core (activations 81,920, sums 2,304, program 4,176), a core has 49,152; at most 2176 "
        "tokens fit; give fewer tokens (a smaller batch.micro) or take a larger mesh"
    )
    most = most_tokens(4096, 1024, layout, SIM)
    assert check_fits(StreamedProduct(4096, 1024, most), layout, SIM).fits
    with pytest.raises(BudgetError):
        check_fits(StreamedProduct(4096, 1024, most + 1), layout, SIM)


def test_layer_of_which_no_token_fits_is_refused():
    with pytest.raises(BudgetError) as error:
        check_fits(StreamedProduct(12288, 12288, 1), ActivationLayout(Mesh(1, 1)), SIM)
    assert str(error.value).endswith("a core has 49,152; take a larger mesh")


def test_layer_without_a_fitting_layout_is_refused():
    with pytest.raises(BudgetError) as error:
        choose_layout(StreamedProduct(12288, 12288, 4096), Mesh(4, 4), SIM)
    text = str(error.value)
    assert text.startswith("12288 x 12288 with 4096 tokens on 4x4 cores needs ")
    assert text.endswith("a core has 49,152; lower the tokens or take a larger mesh")


def test_impossible_groups_are_refused():
    with pytest.raises(ConfigError) as error:
        ActivationLayout(Mesh(4, 8), column_groups=9)
    assert str(error.value) == (
        "layout: expected column_groups from 1 to 8, the cores along that axis of 4x8, got 9"
    )
    with pytest.raises(ConfigError) as error:
        ActivationLayout(Mesh(4, 8), column_groups=2, row_groups=2)
    assert str(error.value) == ("layout: expected column_groups or row_groups to be 1, got 2 and 2")
