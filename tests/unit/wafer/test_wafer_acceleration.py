"""Acceleration by sparsity: limits, saturation, and refusals."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.wafer import CS2_MESH, SILICON, SIM, Mesh
from penstock.wafer.closed_form import HIDDEN, PAID, acceleration_curve, saturation

WIDTH, TOKENS = 12288, 131072


@pytest.mark.parametrize("core", [SIM, SILICON], ids=lambda core: core.name)
@pytest.mark.parametrize("rule", ["plain", "dense", "best"])
def test_acceleration_grows_with_sparsity_and_never_exceeds_the_ideal(core, rule):
    curve = acceleration_curve(WIDTH, WIDTH, TOKENS, CS2_MESH, core, layout=rule)
    found = [point.acceleration for point in curve]
    assert found == sorted(found)
    # A sparse weight is best in other layouts than a dense one, never faster per entry by much.
    assert all(point.acceleration <= 1.02 * point.ideal for point in curve)


def test_plain_layout_saturates_at_the_words_that_enter_cores():
    curve = acceleration_curve(
        WIDTH, WIDTH, TOKENS, CS2_MESH, SIM, layout="plain", products=("forward",)
    )
    last = curve[-1]
    assert last.binding == "words into cores"
    # Dense, each of 12288^2 entries costs a core row 9 + 33 cycles; 132 tokens are 66 words, which
    # a control word follows.
    dense = WIDTH * 17 * (9 + 33) + WIDTH * 4
    assert last.acceleration == pytest.approx(dense / (WIDTH * 67), rel=0.01)
    assert saturation(curve).binding == "words into cores"


def test_best_layout_saturates_later_than_the_plain_one():
    plain, best = (
        acceleration_curve(WIDTH, WIDTH, TOKENS, CS2_MESH, SIM, layout=rule, sparsities=(0.99,))
        for rule in ("plain", "best")
    )
    assert best[0].acceleration > 2 * plain[0].acceleration
    assert best[0].cycles < plain[0].cycles


def test_paid_sums_accelerate_less_than_hidden_ones():
    hidden, paid = (
        acceleration_curve(
            WIDTH,
            WIDTH,
            TOKENS,
            CS2_MESH,
            SIM,
            layout="plain",
            products=("forward",),
            sparsities=(0.9,),
            options=options,
        )[0]
        for options in (HIDDEN, PAID)
    )
    assert paid.acceleration < hidden.acceleration < 10


def test_engines_share_the_tokens():
    one, sixteen = (
        acceleration_curve(4096, 4096, tokens, CS2_MESH, SIM, engines=engines, sparsities=(0.9,))
        for tokens, engines in ((TOKENS, 1), (16 * TOKENS, 16))
    )
    assert one == sixteen
    less = acceleration_curve(4096, 4096, TOKENS, CS2_MESH, SIM, engines=16, sparsities=(0.9,))
    assert less[0].dense_cycles > one[0].dense_cycles / 16


def test_no_saturation_is_found_where_there_is_none():
    curve = acceleration_curve(4096, 4096, 1 << 16, Mesh(64, 1024), SIM, sparsities=(0.5,))
    assert saturation(curve, share=0.1) is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"sparsities": (0.5, 1.0)},
            "sparsity: expected a number from 0 to below 1, got 1; write 0.9 for 90 %",
        ),
        (
            {"products": ("forwards",)},
            "products: expected some of forward, data gradient, weight gradient, got forwards",
        ),
        ({"products": ()}, "products: expected some of forward, data gradient, weight gradient, "),
        ({"engines": 0}, "engines: expected a number from 1 up, got 0"),
    ],
)
def test_impossible_curves_are_refused(arguments, text):
    with pytest.raises(ConfigError) as error:
        acceleration_curve(64, 64, 64, Mesh(4, 4), SIM, **arguments)
    assert str(error.value).startswith(text)
