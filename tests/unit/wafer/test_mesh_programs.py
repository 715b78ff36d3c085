"""Programs of the mesh: numbers against NumPy and SciPy, cycles against published ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.sparse.linalg import LinearOperator, bicgstab, cg

from penstock.errors import ConfigError
from penstock.wafer import SILICON, SIM, Mesh, published_rows
from penstock.wafer.closed_form import all_reduce_cycles
from penstock.wafer.programs import (
    LOOP_FORMS,
    simulate_axpy,
    simulate_dense_product,
    simulate_dot,
    simulate_loop_form,
    simulate_matrix_vector,
    simulate_relay,
    simulate_ring_all_reduce,
    simulate_solver,
    simulate_stencil,
    simulate_tree_all_reduce,
)

MESHES = [Mesh(1, 1), Mesh(1, 5), Mesh(4, 1), Mesh(3, 4), Mesh(6, 5)]
COEFFICIENTS = (7.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0)
UPWIND = (7.0, -1.5, -0.5, -1.0, -0.8, -1.2, -0.9)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def apply_stencil(values: np.ndarray, coefficients) -> np.ndarray:
    own, north, east, south, west, below, above = coefficients
    padded = np.pad(values.astype(float), 1)
    centre = slice(1, -1)
    return (
        own * padded[centre, centre, centre]
        + north * padded[:-2, centre, centre]
        + south * padded[2:, centre, centre]
        + west * padded[centre, :-2, centre]
        + east * padded[centre, 2:, centre]
        + below * padded[centre, centre, :-2]
        + above * padded[centre, centre, 2:]
    )


# --- published cycles -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOOP_FORMS)
def test_simulated_loop_forms_are_within_15_percent_of_published_cycles(name):
    (row,) = [row for row in published_rows() if row.what == name]
    found, report = simulate_loop_form(name, SIM)
    assert report.cycles == pytest.approx(row.published, rel=0.15)
    calls = 256 if "16" in name else 1
    assert found[0] == calls / 2


@pytest.mark.parametrize("words", [64, 512])
@pytest.mark.parametrize("cores", [1, 2, 4, 8])
def test_simulated_relays_are_within_15_percent_of_published_cycles(words, cores):
    published = 1.001 * cores * words + 16.1 * cores + 16.5
    sent = numbers(words)
    found, report = simulate_relay(sent, cores, SIM)
    assert report.cycles == pytest.approx(published, rel=0.15)
    assert (found == sent).all()


def test_scalar_work_beside_a_vector_operation_is_free_only_with_a_data_path_of_its_own():
    name = "operation beside scalar work"
    assert simulate_loop_form(name, SIM)[1].cycles >= 2 * 514
    alone = dataclasses.replace(SIM, threads_share_data_path=False)
    assert simulate_loop_form(name, alone)[1].cycles == pytest.approx(514, rel=0.02)


def test_unknown_loop_form_is_refused_with_the_nearest():
    with pytest.raises(ConfigError) as error:
        simulate_loop_form("256 on 16, map", SIM)
    assert str(error.value).endswith("got '256 on 16, map' (did you mean '256 on 16, @map'?)")


# --- collectives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("root", ["centre", "corner"])
def test_every_core_has_the_sum_after_an_all_reduce_by_tree(mesh, root):
    values = numbers(mesh.cores, 6)
    found, _ = simulate_tree_all_reduce(values, mesh, SIM, root)
    assert np.allclose(found, values.astype(float).sum(axis=0), atol=1e-5)
    assert (found == found[0]).all()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_core_has_the_sum_after_an_all_reduce_by_rings(mesh):
    values = numbers(mesh.cores, 60)
    found, _ = simulate_ring_all_reduce(values, mesh, SIM)
    assert np.allclose(found, values.astype(float).sum(axis=0), atol=1e-5)
    assert (found == found[0]).all()


def test_rings_move_long_vectors_faster_than_a_tree_and_short_ones_slower():
    mesh = Mesh(1, 8)
    long, short = numbers(8, 2048), numbers(8, 8)
    cycles = [
        [form(values, mesh, SIM)[1].cycles for values in (short, long)]
        for form in (simulate_tree_all_reduce, simulate_ring_all_reduce)
    ]
    assert cycles[0][0] < cycles[1][0]
    assert cycles[0][1] > cycles[1][1]


@pytest.mark.parametrize("mesh", [Mesh(40, 41), Mesh(1, 30), Mesh(23, 8)], ids=str)
@pytest.mark.parametrize("core", [SIM, SILICON], ids=lambda core: core.name)
@pytest.mark.parametrize("root", ["centre", "corner"])
@pytest.mark.parametrize(("algorithm", "words"), [("star", 1), ("chain", 1), ("chain", 48)])
def test_all_reduce_takes_the_cycles_of_the_closed_form_of_its_algorithm(
    mesh, core, root, algorithm, words
):
    values = numbers(mesh.cores, words)
    found, report = simulate_tree_all_reduce(values, mesh, core, root, algorithm)
    assert np.allclose(found, values.astype(float).sum(axis=0), atol=1e-3)
    expected = all_reduce_cycles(mesh, core, words, root=root, algorithm=algorithm)
    assert report.cycles == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("core", [SIM, SILICON], ids=lambda core: core.name)
def test_chain_takes_a_ramp_twice_and_an_operation_at_every_core(core):
    _, report = simulate_tree_all_reduce(numbers(1640, 1), Mesh(40, 41), core, algorithm="chain")
    # Luczynski et al. (HPDC 2024). Half a row and half a column, and one broadcast over both.
    hops = 20 + 20
    chains = hops * (core.hop_cycles + 2 * core.ramp_cycles + 1)
    broadcast = hops * core.hop_cycles
    alone = core.vector_cycles + core.drain_cycles  # of each line's first sum, at most
    assert chains + broadcast <= report.cycles
    assert report.cycles <= (chains + broadcast) * core.word_cycles * 1.05 + 4 * alone


@pytest.mark.parametrize("words", [1, 5])
@pytest.mark.parametrize("root", ["centre", "corner"])
def test_all_reduce_takes_the_faster_algorithm_as_the_closed_form_does(words, root):
    mesh, values = Mesh(9, 12), numbers(108, words)
    algorithm = "star" if words == 1 else "chain"
    _, report = simulate_tree_all_reduce(values, mesh, SIM, root)
    _, named = simulate_tree_all_reduce(values, mesh, SIM, root, algorithm)
    assert report.cycles == named.cycles
    expected = [all_reduce_cycles(mesh, SIM, words, root=root, algorithm=algorithm)]
    assert [all_reduce_cycles(mesh, SIM, words, root=root)] == expected


def test_star_of_a_vector_is_refused():
    with pytest.raises(ConfigError) as error:
        simulate_tree_all_reduce(numbers(6, 2), Mesh(2, 3), SIM, algorithm="star")
    assert str(error.value) == (
        "all-reduce: expected one word in a star, whose words mix on their way, got 2; take a chain"
    )


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("root", ["centre", "corner"])
@pytest.mark.parametrize("algorithm", ["star", "chain"])
@pytest.mark.parametrize("queue_words", [1, 6])
def test_one_word_is_summed_on_any_mesh_with_any_queues(mesh, root, algorithm, queue_words):
    core = dataclasses.replace(SIM, queue_words=queue_words)
    values = numbers(mesh.cores, 1)
    found, report = simulate_tree_all_reduce(values, mesh, core, root, algorithm)
    assert np.allclose(found, values.astype(float).sum(axis=0), atol=1e-5)
    assert report.greatest_depth <= queue_words


def test_rings_need_elements_that_divide():
    with pytest.raises(ConfigError) as error:
        simulate_ring_all_reduce(numbers(6, 7), Mesh(2, 3), SIM)
    assert str(error.value) == (
        "all-reduce: expected elements that divide by 2 rows and 3 columns, got 7; add zeros"
    )


# --- dense ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [1, 2, 4])
@pytest.mark.parametrize("core", [SIM, SILICON], ids=lambda core: core.name)
def test_dense_product_is_that_of_numpy(side, core):
    a, b = numbers(8 * side, 6 * side), numbers(6 * side, 10 * side, seed=1)
    found, report = simulate_dense_product(a, b, Mesh(side, side), core, rounds=False)
    assert np.allclose(found, a @ b, atol=1e-4)
    # 8 x 6 AXPYs of 10 elements per step.
    assert report.cycles >= side * 48 * (core.vector_cycles + core.elements_cycles(10))


def test_dense_product_of_16_bit_numbers_is_rounded_after_every_addition():
    a, b = numbers(4, 6), numbers(6, 8, seed=1)
    found, _ = simulate_dense_product(a, b, Mesh(1, 1), SIM)
    a, b = (x.astype(np.float16).astype(np.float32) for x in (a, b))
    expected = np.zeros((4, 8), np.float32)
    for inner in range(6):
        product = expected + a[:, inner, None] * b[inner]
        expected = product.astype(np.float16).astype(np.float32)
    assert (found == expected).all()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_matrix_vector_product_is_that_of_numpy(mesh):
    weight, vector = numbers(12, 20), numbers(20, seed=1)
    weight = np.repeat(np.repeat(weight, mesh.rows, axis=0), mesh.columns, axis=1)
    vector = np.repeat(vector, mesh.columns)
    found, report = simulate_matrix_vector(weight, vector, mesh, SIM, rounds=False)
    assert np.allclose(found, weight @ vector, rtol=1e-4, atol=1e-3)
    assert report.cycles > 20 * (9 + 3)


def test_matrix_vector_product_reads_weights_as_fast_as_the_vector_unit_can():
    # Columns of 400 elements: an AXPY takes 100 cycles, set-up and trigger 9.
    weight, vector = numbers(2 * 400, 2 * 50), numbers(100, seed=1)
    _, report = simulate_matrix_vector(weight, vector, Mesh(2, 2), SIM, rounds=False)
    assert report.cycles == pytest.approx(50 * 109, rel=0.08)


# --- vectors, stencils, solvers -------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_vector_operations_are_those_of_numpy(mesh):
    x, y = numbers(101), numbers(101, seed=1)
    found, _ = simulate_axpy(0.75, x, y, mesh, SIM)
    assert np.allclose(found, y + 0.75 * x, atol=1e-6)
    dots, _ = simulate_dot(x, y, mesh, SIM)
    assert np.allclose(dots, x.astype(float) @ y, atol=1e-4)
    assert len(dots) == mesh.cores


@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 4, 3), (3, 1, 2), (4, 5, 6)])
@pytest.mark.parametrize("times", [1, 3])
def test_stencil_is_that_of_numpy(shape, times):
    values = numbers(*shape)
    found, _ = simulate_stencil(values, UPWIND, SIM, times=times)
    expected = values.astype(float)
    for _ in range(times):
        expected = apply_stencil(expected, UPWIND)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("method", "reference", "coefficients"),
    [("cg", cg, COEFFICIENTS), ("bicgstab", bicgstab, UPWIND)],
)
def test_solvers_take_the_steps_of_scipy(method, reference, coefficients):
    shape = (4, 5, 6)
    right = numbers(*shape)
    matrix = LinearOperator(
        (right.size, right.size),
        matvec=lambda x: apply_stencil(x.reshape(shape), coefficients).ravel(),
    )
    for iterations in (1, 4, 8):
        expected, _ = reference(matrix, right.ravel().astype(float), maxiter=iterations, rtol=1e-12)
        found, _ = simulate_solver(method, right, coefficients, SIM, iterations)
        assert np.allclose(found.ravel(), expected, atol=1e-5), iterations
    residual = right - apply_stencil(found, coefficients)
    assert np.linalg.norm(residual) < 2e-3 * np.linalg.norm(right)


def test_vectors_of_two_lengths_are_refused():
    with pytest.raises(ConfigError) as error:
        simulate_axpy(1.0, numbers(99), numbers(100), Mesh(2, 2), SIM)
    assert str(error.value) == (
        "vectors: expected two of one length from 1 up, got the shapes [99] and [100]"
    )


def test_unknown_solvers_and_no_iterations_are_refused():
    with pytest.raises(ConfigError) as error:
        simulate_solver("bicgstub", numbers(2, 2, 4), COEFFICIENTS, SIM, 1)
    assert str(error.value) == (
        "solver: expected cg or bicgstab, got 'bicgstub' (did you mean 'bicgstab'?)"
    )
    with pytest.raises(ConfigError) as error:
        simulate_solver("cg", numbers(2, 2, 4), COEFFICIENTS, SIM, 0)
    assert str(error.value) == "solver: expected iterations from 1 up, got 0"
    with pytest.raises(ConfigError) as error:
        simulate_solver("cg", numbers(2, 4), COEFFICIENTS, SIM, 1)
    assert str(error.value) == (
        "stencil: expected values [rows, columns, cells], got the shape [2, 4]"
    )


def test_stencil_of_no_application_is_refused():
    with pytest.raises(ConfigError) as error:
        simulate_stencil(numbers(2, 2, 4), COEFFICIENTS, SIM, times=0)
    assert str(error.value) == "stencil: expected applications from 1 up, got 0"


def test_stencil_takes_seven_coefficients():
    with pytest.raises(ConfigError) as error:
        simulate_stencil(numbers(2, 2, 4), (1.0, 2.0), SIM)
    assert str(error.value) == (
        "stencil: expected 7 coefficients and 2 cells or more along z, got 2 and 4"
    )
