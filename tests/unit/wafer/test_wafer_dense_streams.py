"""Dense weights enter the simulated mesh without indices: numbers and cycles."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.wafer import SILICON, SIM, Mesh
from penstock.wafer.closed_form import (
    HIDDEN,
    PAID,
    ActivationLayout,
    StreamingOptions,
    data_gradient,
    forward,
)
from penstock.wafer.programs import (
    Run,
    Spread,
    closed_form_of,
    simulate_data_gradient,
    simulate_forward,
)

# Entries of one token take less than a word and its index: the words at the edge decide.
QUICK = dataclasses.replace(SIM, name="quick", task_cycles=0.0, vector_cycles=0.0)
RING = StreamingOptions(reduction="ring", accumulators=16)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("options", [HIDDEN, PAID, RING])
@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(3, 4), Mesh(7, 2)], ids=str)
def test_numbers_are_those_with_indices_to_the_bit(mesh, options):
    run = Run(mesh, SIM, options, element_bytes=4)
    weight, x, dy = drawn(9, 5), drawn(11, 5, seed=1), drawn(11, 9, seed=2)
    mask = np.ones_like(weight, bool)
    for simulate, activations in ((simulate_forward, x), (simulate_data_gradient, dy)):
        indexed = simulate(weight, mask, activations, run)
        found = simulate(weight, None, activations, run)
        assert (found.numbers == indexed.numbers).all()
        assert found.cycles <= indexed.cycles
    assert np.allclose(simulate_forward(weight, None, x, run).numbers, x @ weight.T, atol=1e-5)


@pytest.mark.parametrize("core", [SIM, QUICK], ids=lambda core: core.name)
@pytest.mark.parametrize("tokens", [4, 48])
def test_cycles_are_those_of_the_closed_form_without_indices(core, tokens):
    run = Run(Mesh(4, 4), core, HIDDEN, element_bytes=4)
    weight, x, dy = drawn(64, 48), drawn(tokens, 48), drawn(tokens, 64)
    spread = Spread(np.ones_like(weight, bool), tokens, run)
    product, counts, options = closed_form_of(spread, run, is_indexed=False)
    layout = ActivationLayout(run.mesh)
    for form, simulate, activations in (
        (forward, simulate_forward, x),
        (data_gradient, simulate_data_gradient, dy),
    ):
        found = simulate(weight, None, activations, run).cycles
        assert found == pytest.approx(form(product, layout, core, options, counts).total, rel=0.05)


@pytest.mark.parametrize("core", [SIM, SILICON], ids=lambda core: core.name)
@pytest.mark.parametrize("tokens", [4, 64])
def test_index_beside_a_16_bit_value_costs_no_cycles(core, tokens):
    run = Run(Mesh(4, 4), core, HIDDEN, element_bytes=2, rounds=False)
    weight, x, dy = drawn(64, 48), drawn(tokens, 48), drawn(tokens, 64)
    spread = Spread(np.ones_like(weight, bool), tokens, run)
    product, counts, options = closed_form_of(spread, run, is_indexed=False)
    assert product.words_per_entry == 0.5
    for form, simulate, activations, controls in (
        (forward, simulate_forward, x, 64),
        (data_gradient, simulate_data_gradient, dy, 63),
    ):
        found = simulate(weight, None, activations, run)
        # One word per value, where the closed form has one for two.
        assert found.report.words_entered["entries"] == weight.size + 4 * controls
        expected = form(product, ActivationLayout(run.mesh), core, options, counts).total
        assert found.cycles == pytest.approx(expected, rel=0.01)


def test_words_at_the_edge_are_half_as_many():
    run = Run(Mesh(4, 4), QUICK, HIDDEN, element_bytes=4)
    weight, x = drawn(64, 48), drawn(4, 48)
    dense = simulate_forward(weight, None, x, run).cycles
    indexed = simulate_forward(weight, np.ones_like(weight, bool), x, run).cycles
    words = weight.size // run.mesh.rows  # values that enter a row of cores
    assert words < dense < 2 * words < indexed
