"""Streamed products, simulated: numbers against NumPy, cycles against the closed form.

The five comparisons of the closed form with a small mesh: equal rows, single rows and columns of
cores, a mask's own counts, little room, and rows exchanged. Both have the same parameters.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from penstock.errors import BudgetError, ConfigError
from penstock.wafer import SILICON, SIM, Mesh
from penstock.wafer.closed_form import (
    HIDDEN,
    PAID,
    ActivationLayout,
    StreamedProduct,
    StreamingOptions,
    count_mask,
    data_gradient,
    forward,
    weight_gradient,
)
from penstock.wafer.programs import (
    Run,
    simulate_data_gradient,
    simulate_forward,
    simulate_weight_gradient,
)

ALTERED = dataclasses.replace(
    SIM,
    name="altered",
    vector_cycles=3.0,
    task_cycles=1.5,
    hop_cycles=2.0,
    word_cycles=1.125,
    partial_sum_cycles=6.0,
    half_group_cycles=1.25,
    queue_words=6,
)
RING = StreamingOptions(reduction="ring", accumulators=16)
FORMS = {"forward": forward, "data gradient": data_gradient, "weight gradient": weight_gradient}


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_mask(outputs: int, inputs: int, density: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((outputs, inputs)) < density


def simulate(name: str, mask: np.ndarray, tokens: int, run: Run, weight: np.ndarray | None = None):
    """Simulate a product of random numbers; return it with what NumPy says."""
    outputs, inputs = mask.shape
    x, dy = numbers(tokens, inputs, seed=1), numbers(tokens, outputs, seed=2)
    w = numbers(outputs, inputs, seed=3) if weight is None else weight
    if name == "forward":
        return simulate_forward(w, mask, x, run), x @ (w * mask).T
    if name == "data gradient":
        return simulate_data_gradient(w, mask, dy, run), dy @ (w * mask)
    return simulate_weight_gradient(mask, x, dy, run), (dy.T @ x) * mask


def closed(name: str, mask: np.ndarray, tokens: int, run: Run):
    """Return what the closed form says for the mask's own counts."""
    product = StreamedProduct(*mask.shape, tokens, element_bytes=run.element_bytes)
    counts = count_mask(mask, run.mesh.rows, is_sorted=run.options.is_sorted)
    return FORMS[name](product, ActivationLayout(run.mesh), run.core, run.options, counts)


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("options", [HIDDEN, PAID, RING, StreamingOptions(sums="paid")])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_numbers_of_the_products_are_those_of_numpy(name, options, element_bytes):
    for mesh, density in ((Mesh(1, 1), 1.0), (Mesh(3, 4), 0.3), (Mesh(5, 2), 0.05)):
        run = Run(mesh, SIM, options, element_bytes, rounds=False)
        found, expected = simulate(name, random_mask(17, 23, density), 19, run)
        assert found.numbers.shape == expected.shape
        assert np.allclose(found.numbers, expected, atol=1e-4), mesh


def test_16_bit_sums_are_rounded_after_every_addition():
    weight, x = numbers(6, 9), numbers(5, 9, seed=1)
    found = simulate_forward(weight, None, x, Run(Mesh(1, 1), SIM, HIDDEN)).numbers
    weight, x = (a.astype(np.float16).astype(np.float32) for a in (weight, x))
    expected = np.zeros((5, 6), np.float32)
    for feature in range(9):
        expected += x[:, feature, None] * weight[:, feature]
        expected = expected.astype(np.float16).astype(np.float32)
    # Features of a dense weight are in their own order.
    assert (found == expected).all()


def test_rows_of_cores_without_features_or_entries_pass_sums_on():
    mask = np.zeros((9, 3), bool)
    mask[2, 1] = mask[8, 0] = True
    for options in (HIDDEN, PAID, RING):
        for name in FORMS:
            run = Run(Mesh(6, 2), SIM, options, rounds=False)
            found, expected = simulate(name, mask, 8, run)
            assert np.allclose(found.numbers, expected, atol=1e-5)


# --- (1) equal rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("core", [SIM, ALTERED], ids=lambda core: core.name)
@pytest.mark.parametrize("options", [HIDDEN, PAID], ids=["hidden", "paid"])
def test_dense_products_take_the_cycles_of_the_closed_form_within_1_percent(name, core, options):
    run = Run(Mesh(8, 8), core, options, rounds=False)
    mask = np.ones((96, 128), bool)
    found, _ = simulate(name, mask, 128, run)
    assert found.cycles == pytest.approx(closed(name, mask, 128, run).total, rel=0.01)


# --- (2) single rows and columns of cores ---------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("mesh", [Mesh(1, 16), Mesh(16, 1)], ids=str)
@pytest.mark.parametrize("options", [HIDDEN, PAID], ids=["hidden", "paid"])
def test_single_rows_and_columns_take_the_cycles_of_the_closed_form(name, mesh, options):
    run = Run(mesh, SIM, options, rounds=False)
    for density in (1.0, 0.2):
        mask = random_mask(96, 160, density)
        tokens = 8 * mesh.columns
        found, _ = simulate(name, mask, tokens, run)
        assert found.cycles == pytest.approx(closed(name, mask, tokens, run).total, rel=0.05)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("core", [SIM, SILICON], ids=lambda core: core.name)
@pytest.mark.parametrize("mesh", [Mesh(1, 64), Mesh(1, 256), Mesh(128, 1), Mesh(4, 128)], ids=str)
def test_long_thin_meshes_take_the_cycles_of_the_closed_form(name, core, mesh):
    # Few entries per core, so that crossing the mesh takes a good part of the cycles.
    for tokens, element_bytes, density in ((2, 2, 1.0), (8, 4, 0.5)):
        run = Run(mesh, core, HIDDEN, element_bytes, rounds=False)
        mask = random_mask(16, 16 * mesh.rows, density)
        found, _ = simulate(name, mask, tokens * mesh.columns, run)
        expected = closed(name, mask, tokens * mesh.columns, run).total
        assert found.cycles == pytest.approx(expected, rel=0.05), (tokens, element_bytes, density)


# --- (3) the mask's own counts --------------------------------------------------------------------

QUICK = [(Mesh(4, 2), 96, 256, 32), (Mesh(16, 2), 96, 512, 32)]
LARGER = [
    (Mesh(4, 4), 128, 256, 64),
    (Mesh(8, 8), 256, 256, 128),
    (Mesh(16, 4), 192, 512, 64),
    (Mesh(32, 2), 256, 1024, 64),
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in LARGER)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("mesh", "outputs", "inputs", "tokens"), CASES, ids=str)
@pytest.mark.parametrize("density", [0.5, 0.1, 0.05])
def test_sparse_products_take_the_cycles_of_the_closed_form(
    name, mesh, outputs, inputs, tokens, density
):
    mask = random_mask(outputs, inputs, density)
    for core, options in ((SIM, HIDDEN), (SIM, PAID), (ALTERED, HIDDEN)):
        run = Run(mesh, core, options, rounds=False)
        found, _ = simulate(name, mask, tokens, run)
        expected = closed(name, mask, tokens, run).total
        assert found.cycles == pytest.approx(expected, rel=0.05), (core.name, options.sums)


OF_FORWARD = [HIDDEN, PAID, StreamingOptions(accumulators=2), RING]


def options_of(name: str) -> list[StreamingOptions]:
    if name == "forward":
        return OF_FORWARD
    return [HIDDEN, StreamingOptions(broadcast_rows=2)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("density", [0.05, 0.02])
def test_links_that_are_nearly_as_busy_as_cores_are_waited_for(name, tokens, density):
    mask = random_mask(96, 256, density)  # less than an entry per output feature and core
    for options in options_of(name):
        run = Run(Mesh(16, 2), SIM, options, rounds=False)
        found, _ = simulate(name, mask, tokens, run)
        expected = closed(name, mask, tokens, run)
        assert found.cycles == pytest.approx(expected.total, rel=0.065), options


@pytest.mark.long
def test_closed_form_agrees_within_5_percent_almost_everywhere():
    errors = []
    for queue_words, (mesh, outputs, inputs), density, tokens, name in itertools.product(
        (1, 2, 4, 8),
        ((Mesh(16, 2), 96, 256), (Mesh(8, 4), 96, 256), (Mesh(4, 8), 64, 128)),
        (0.5, 0.1, 0.05, 0.02),
        (16, 64, 128),
        FORMS,
    ):
        core = dataclasses.replace(SIM, queue_words=queue_words)
        mask = random_mask(outputs, inputs, density)
        for options in options_of(name):
            run = Run(mesh, core, options, rounds=False)
            found, _ = simulate(name, mask, tokens, run)
            total = closed(name, mask, tokens, run).total
            errors.append((abs(total / found.cycles - 1), name, options, queue_words, density))
    assert np.mean([error[0] <= 0.05 for error in errors]) >= 0.97
    assert max(errors, key=lambda error: error[0])[0] <= 0.1, max(errors, key=lambda e: e[0])


# --- (4) little room ------------------------------------------------------------------------------


def test_fewer_accumulators_and_inbox_rows_tend_to_a_barrier_at_every_output_feature():
    mask = random_mask(192, 512, 0.1)
    mesh = Mesh(16, 2)
    core = dataclasses.replace(SIM, queue_words=1)
    counts = count_mask(mask, 16).counts
    entry = SIM.trigger_cycles + SIM.elements_cycles(8)
    barrier = counts.max(axis=1).sum() * entry
    mean = counts.mean(axis=1).sum() * entry
    cycles = []
    for accumulators, inbox in ((16, None), (8, 8), (4, 4), (2, 2), (1, 1)):
        options = StreamingOptions(accumulators=accumulators, inbox_rows=inbox)
        run = Run(mesh, core, options, rounds=False)
        found, _ = simulate("forward", mask, 16, run)
        cycles.append(found.cycles)
        expected = closed("forward", mask, 16, run).total
        assert found.cycles == pytest.approx(expected, rel=0.05), (accumulators, inbox)
    assert cycles == sorted(cycles)
    assert cycles[0] < mean + 0.25 * (barrier - mean) + 192 * 5
    assert cycles[-1] > mean + 0.5 * (barrier - mean)


@pytest.mark.parametrize("name", ["data gradient", "weight gradient"])
def test_one_held_row_of_gradients_is_a_barrier_at_every_output_feature(name):
    mask = random_mask(96, 512, 0.1)
    counts = count_mask(mask, 16).counts
    entry = SIM.trigger_cycles + SIM.elements_cycles(64) + (name == "weight gradient")
    barrier = counts.max(axis=1).sum() * entry
    # A row of dY has 32 words, of which queues of one word hold little; it enters when the slowest
    # core is done with the row before, each word two cycles (of the ramp) after the one before.
    core = dataclasses.replace(SIM, queue_words=1)
    run = Run(Mesh(16, 2), core, StreamingOptions(broadcast_rows=1), rounds=False)
    found, _ = simulate(name, mask, 128, run)
    assert found.cycles == pytest.approx(barrier + 96 * 32 * core.ramp_cycles, rel=0.03)
    wide = dataclasses.replace(run, options=StreamingOptions(broadcast_rows=16))
    assert simulate(name, mask, 128, wide)[0].cycles < 0.8 * found.cycles


@pytest.mark.parametrize("name", ["data gradient", "weight gradient"])
@pytest.mark.parametrize("tokens", [16, 64], ids="{} tokens".format)
@pytest.mark.parametrize("held", [1, 2, 8])
@pytest.mark.parametrize("queue_words", [1, 4, 8])
def test_queues_hold_rows_of_gradients_as_the_closed_form_says(name, tokens, held, queue_words):
    mask = random_mask(96, 256, 0.1)
    core = dataclasses.replace(SIM, queue_words=queue_words)
    run = Run(Mesh(16, 2), core, StreamingOptions(broadcast_rows=held), rounds=False)
    found, _ = simulate(name, mask, tokens, run)
    assert found.cycles == pytest.approx(closed(name, mask, tokens, run).total, rel=0.05)


# --- (5) rows of equal entries exchanged ----------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_rows_of_equal_entries_may_be_exchanged(name):
    generator = np.random.default_rng(0)
    # Each output feature has as many entries in each row of cores; only their order changes.
    mask = np.zeros((48, 64), bool)
    for output in range(48):
        for row in range(8):
            chosen = generator.choice(8, 2 + output % 4, replace=False)
            mask[output, row * 8 + chosen] = True
    options = StreamingOptions(is_sorted=False)
    run = Run(Mesh(8, 4), SIM, options, rounds=False)
    cycles = [
        simulate(name, mask[order], 32, run)[0].cycles
        for order in (np.arange(48), generator.permutation(48))
    ]
    assert cycles[0] == pytest.approx(cycles[1], rel=0.005)


# --- bounds, layout, refusals ---------------------------------------------------------------------


def test_more_sparsity_is_less_time_and_more_starving():
    run = Run(Mesh(8, 4), SIM, HIDDEN, rounds=False)
    reports = [
        simulate("forward", random_mask(128, 256, density), 64, run)[0].report
        for density in (1.0, 0.5, 0.1, 0.02)
    ]
    cycles = [report.cycles for report in reports]
    assert cycles == sorted(cycles, reverse=True)
    assert reports[0].busy_share > 0.95
    shares = [report.busy_share for report in reports]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.9


def test_ring_leaves_outputs_divided_over_the_rows():
    run = Run(Mesh(4, 2), SIM, RING, rounds=False)
    found, expected = simulate("forward", random_mask(10, 16, 0.5), 8, run)
    assert np.allclose(found.numbers, expected, atol=1e-5)
    assert found.report.link_words[3, :, 2].tolist() == [0, 0]  # nothing leaves to the south


def test_layer_beyond_the_memory_of_cores_is_refused():
    with pytest.raises(BudgetError) as error:
        simulate("forward", np.ones((8, 4096), bool), 64, Run(Mesh(2, 2), SIM, HIDDEN))
    assert str(error.value) == (
        "core (0, 0): array 'activations' needs 131,072 bytes beside 0 of other arrays; a core has "
        "44,976 for data; take a larger mesh or fewer tokens"
    )


def test_masks_that_do_not_fit_are_refused():
    run = Run(Mesh(2, 2), SIM, HIDDEN)
    with pytest.raises(ConfigError) as error:
        simulate_forward(numbers(4, 8), np.ones((8, 4), bool), numbers(3, 8), run)
    assert str(error.value) == "mask: expected the shape of the weight, [4, 8], got [8, 4]"
    with pytest.raises(ConfigError) as error:
        simulate_forward(numbers(4, 8), None, numbers(3, 9), run)
    assert str(error.value) == "activations: expected the shape [3, 8], got [3, 9]"
    with pytest.raises(ConfigError) as error:
        simulate_data_gradient(numbers(4, 8), None, numbers(3, 5), run)
    assert str(error.value) == "gradients: expected the shape [3, 4], got [3, 5]"
    with pytest.raises(ConfigError) as error:
        simulate_weight_gradient(np.ones((4, 8), bool), numbers(3, 8), numbers(2, 4), run)
    assert str(error.value) == "gradients: expected the shape [3, 4], got [2, 4]"
    with pytest.raises(ConfigError) as error:
        simulate_weight_gradient(numbers(4, 8), numbers(3, 8), numbers(3, 4), run)
    assert str(error.value) == (
        "mask: expected booleans with the shape [outputs, inputs], got an array of float32 with "
        "shape [4, 8]"
    )
