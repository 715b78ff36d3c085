"""What holds for every run of the mesh: words are kept, queues have a depth, time has bounds."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock.wafer import SILICON, SIM, CoreParameters, Mesh
from penstock.wafer.closed_form import StreamingOptions
from penstock.wafer.language import MeshProgram
from penstock.wafer.programs import (
    Run,
    Spread,
    simulate_data_gradient,
    simulate_dense_product,
    simulate_dot,
    simulate_forward,
    simulate_matrix_vector,
    simulate_relay,
    simulate_ring_all_reduce,
    simulate_solver,
    simulate_stencil,
    simulate_tree_all_reduce,
    simulate_weight_gradient,
)

CORES = st.builds(
    dataclasses.replace,
    st.sampled_from([SIM, SILICON]),
    queue_words=st.integers(1, 7),
    hop_cycles=st.sampled_from([1.0, 2.0, 1.5]),
    word_cycles=st.sampled_from([1.0, 1.125, 2.0]),
    ramp_cycles=st.sampled_from([0.0, 1.0, 2.0]),
    threads_share_data_path=st.booleans(),
)
OPTIONS = st.builds(
    StreamingOptions,
    sums=st.sampled_from(["hidden", "paid"]),
    accumulators=st.integers(1, 5),
    inbox_rows=st.sampled_from([None, 1, 2]),
    broadcast_rows=st.integers(1, 3),
    reduction=st.sampled_from(["chain", "ring"]),
)
MESHES = st.builds(Mesh, st.integers(1, 5), st.integers(1, 5))


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(report, core: CoreParameters) -> None:
    """No queue beyond its depth, no cycle unaccounted, no link in use all the time and more."""
    assert report.greatest_depth <= core.queue_words
    total = report.busy + report.starved + report.blocked
    assert np.allclose(total, report.cycles)
    assert report.link_occupancy.max() <= 1 + core.word_cycles / max(report.cycles, 1)


@settings(max_examples=12, deadline=None)
@given(
    mesh=MESHES,
    core=CORES,
    options=OPTIONS,
    shape=st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 11)),
    density=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    element_bytes=st.sampled_from([2, 4]),
    seed=st.integers(0, 99),
)
def test_products_end_with_the_right_numbers_on_any_mesh_with_any_queues(
    mesh, core, options, shape, density, element_bytes, seed
):
    outputs, inputs, tokens = shape
    mask = np.random.default_rng(seed).random((outputs, inputs)) < density
    weight = numbers(outputs, inputs, seed=seed)
    x, dy = numbers(tokens, inputs, seed=seed + 1), numbers(tokens, outputs, seed=seed + 2)
    run = Run(mesh, core, options, element_bytes, rounds=False)
    y = simulate_forward(weight, mask, x, run)
    dx = simulate_data_gradient(weight, mask, dy, run)
    dw = simulate_weight_gradient(mask, x, dy, run)
    assert np.allclose(y.numbers, x @ (weight * mask).T, atol=1e-4)
    assert np.allclose(dx.numbers, dy @ (weight * mask), atol=1e-4)
    assert np.allclose(dw.numbers, (dy.T @ x) * mask, atol=1e-4)
    here = math.ceil(tokens / mesh.columns)
    rows = math.ceil(here * element_bytes / 4)
    words = 1 if element_bytes == 2 else 2
    entries = int(mask.sum())
    rows_of = Spread(mask, tokens, run).rows
    most = int(np.bincount(rows_of, weights=mask.sum(axis=0)).max())
    for product, each in ((y, words), (dx, words), (dw, 1)):
        report = product.report
        check(report, core)
        last = outputs if product is y else outputs - 1
        # Words in: entries and control words of every row of cores; each is delivered to all
        # columns.
        assert report.words_entered["entries"] == entries * each + mesh.rows * last
        assert report.words_delivered["entries"] == (report.words_entered["entries"] * mesh.columns)
        # Never fewer cycles than arithmetic, memory, or entries on a link of the fullest core.
        trigger = core.trigger_cycles + core.elements_cycles(here, element_bytes)
        assert report.cycles >= most * trigger
        # A core reads two and writes one element for each entry and token, 24 bytes in a cycle.
        assert report.cycles >= most * here * 3 * element_bytes / 24
        assert report.cycles >= (most * each + last) * core.word_cycles
    if "sums" in y.report.words_entered:
        assert y.report.words_entered["sums"] == y.report.words_delivered["sums"]
    assert dw.report.words_entered["sums"] == dw.report.words_delivered["sums"]
    for product in (dx, dw):
        # Rows of dY pass every router of a column: the link bounds the time.
        assert product.report.words_delivered["gradients"] == outputs * rows * mesh.cores
        assert product.report.cycles >= outputs * rows * core.word_cycles


@settings(max_examples=5, deadline=None)
@given(mesh=MESHES, core=CORES, seed=st.integers(0, 99))
def test_other_programs_end_on_any_mesh_with_any_queues(mesh, core, seed):
    values = numbers(mesh.cores, 60, seed=seed)
    total = values.astype(float).sum(axis=0)
    for form in (simulate_tree_all_reduce, simulate_ring_all_reduce):
        found, report = form(values, mesh, core)
        assert np.allclose(found, total, atol=1e-4)
        check(report, core)
        for colour, words in report.words_entered.items():
            copies = mesh.cores - 1 if colour == "result" else 1
            assert report.words_delivered[colour] == copies * words
    side = min(mesh.rows, mesh.columns)
    a, b = numbers(2 * side, 2 * side, seed=seed), numbers(2 * side, 4 * side, seed=seed + 1)
    found, report = simulate_dense_product(a, b, Mesh(side, side), core, rounds=False)
    assert np.allclose(found, a @ b, atol=1e-4)
    check(report, core)
    weight, vector = numbers(3 * mesh.rows, 2 * mesh.columns), numbers(2 * mesh.columns)
    found, report = simulate_matrix_vector(weight, vector, mesh, core, rounds=False)
    assert np.allclose(found, weight @ vector, atol=1e-4)
    check(report, core)
    x = numbers(33, seed=seed)
    found, report = simulate_dot(x, x, mesh, core)
    assert np.allclose(found, x.astype(float) @ x, atol=1e-4)
    check(report, core)
    found, report = simulate_relay(x, mesh.columns, core)
    assert (found == x).all()
    check(report, core)
    grid = numbers(mesh.rows, mesh.columns, 3, seed=seed)
    found, report = simulate_stencil(grid, (1.0, 0, 0, 0, 0, 0, 0), core, times=2)
    assert (found == grid).all()
    check(report, core)
    coefficients = (7.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0)
    for method in ("cg", "bicgstab"):
        found, report = simulate_solver(method, grid, coefficients, core, 1)
        assert np.isfinite(found).all()
        check(report, core)


@settings(max_examples=15, deadline=None)
@given(
    core=CORES,
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    cores=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_words_of_each_colour_leave_in_the_order_in_which_they_entered(core, lengths, cores, seed):
    mesh = Mesh(2, cores)
    p = MeshProgram(mesh, core)
    drains, given_words = [], []
    generator = np.random.default_rng(seed)
    for number, length in enumerate(lengths):
        colour = p.colour(f"colour {number}")
        # All colours share the links of the first row, and one of them goes down at its end.
        p.route(colour, p.cores(0, slice(0, -1)), "west", "east")
        p.route(colour, p.cores(0, -1), "west", "south")
        p.route(colour, p.cores(1, -1), "north", "south" if number % 2 else "east")
        words = generator.standard_normal(length).astype(np.float32)
        controls = generator.random(length) < 0.3
        p.feed(colour, 0, "west", words, np.arange(length), controls)
        drains.append(p.drain(colour, 2 * cores - 1, "south" if number % 2 else "east", length))
        given_words.append((words, controls))
    run = p.run()
    for drain, (words, controls) in zip(drains, given_words, strict=True):
        first, second, kinds = run.drained(drain)
        assert (first == words).all()
        assert (second == np.arange(len(words))).all()
        assert (kinds == controls).all()
    check(run.report, core)
    # The shared link carries all words, one per word_cycles.
    assert run.report.cycles >= sum(lengths) * core.word_cycles - core.word_cycles


@settings(max_examples=15, deadline=None)
@given(core=CORES, lengths=st.lists(st.integers(0, 40), min_size=3, max_size=3))
def test_link_that_three_streams_share_carries_one_word_at_a_time(core, lengths):
    p = MeshProgram(Mesh(1, 2), core)
    for side, length in zip(("north", "west", "south"), lengths, strict=True):
        colour = p.colour(side)
        p.route(colour, p.cores(0, 0), side, "east")
        p.route(colour, p.cores(0, 1), "west", "east")
        p.feed(colour, 0, side, np.zeros(length), from_host=False)
        p.drain(colour, 1, "east", length)
    report = p.run().report
    check(report, core)
    assert report.link_words[0, 0, 1] == sum(lengths)
    assert report.cycles >= (sum(lengths) - 1) * core.word_cycles


@pytest.mark.parametrize("core", [SIM, SILICON], ids=lambda core: core.name)
def test_report_of_a_product_is_the_same_every_time(core):
    mask = np.random.default_rng(0).random((24, 40)) < 0.3
    reports = [
        simulate_forward(
            numbers(24, 40), mask, numbers(16, 40), Run(Mesh(4, 4), core, StreamingOptions())
        ).report
        for _ in range(2)
    ]
    assert reports[0].cycles == reports[1].cycles
    assert reports[0].queues == reports[1].queues
    assert reports[0].events == reports[1].events
    assert (reports[0].busy == reports[1].busy).all()
