"""Runs as they were recorded before the tables and kernels of the simulator were laid out anew.

The order in which entities of a tick are served decides who gets a link, so that a change of the
simulator alone must leave every cycle, state and word as it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from penstock.wafer import SILICON, SIM, Mesh
from penstock.wafer.closed_form import StreamingOptions
from penstock.wafer.mesh import MeshReport, TraceOptions
from penstock.wafer.programs import (
    Run,
    simulate_data_gradient,
    simulate_dense_product,
    simulate_forward,
    simulate_matrix_vector,
    simulate_ring_all_reduce,
    simulate_solver,
    simulate_tree_all_reduce,
    simulate_weight_gradient,
)

NARROW = dataclasses.replace(SILICON, queue_words=1, ramp_cycles=0.0, hop_cycles=1.5)
TRACE = TraceOptions(windows=9, cycles=17)


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    """Small whole numbers: their sums are exact, whatever makes the random numbers."""
    return ((np.arange(np.prod(shape)) * 7919 + 31 * seed) % 11 - 5).reshape(shape).astype("f4")


def mask_of(outputs: int, inputs: int) -> np.ndarray:
    places = np.arange(outputs)[:, None] * 37 + np.arange(inputs) * 101
    return places * places % 17 < 4


def product(name: str, mesh: Mesh, core, **options) -> tuple[np.ndarray, MeshReport]:
    mask = mask_of(24, 50)
    run = Run(mesh, core, StreamingOptions(**options), rounds=False, trace=TRACE)
    x, dy = integers(19, 50, seed=1), integers(19, 24, seed=2)
    if name == "forward":
        made = simulate_forward(integers(24, 50), mask, x, run)
    elif name == "data gradient":
        made = simulate_data_gradient(integers(24, 50), mask, dy, run)
    else:
        made = simulate_weight_gradient(mask, x, dy, run)
    return made.numbers, made.report


GRID, STENCIL = integers(3, 5, 4), (16.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0)
RUNS: dict[str, Callable[[], tuple[np.ndarray, MeshReport]]] = {
    "forward": lambda: product("forward", Mesh(5, 3), SIM),
    "forward, one of all": lambda: product(
        "forward", Mesh(3, 7), NARROW, accumulators=1, inbox_rows=1, sums="paid"
    ),
    "forward, ring": lambda: product("forward", Mesh(7, 2), SILICON, reduction="ring"),
    "data gradient": lambda: product("data gradient", Mesh(5, 3), SIM, broadcast_rows=1),
    "weight gradient": lambda: product("weight gradient", Mesh(3, 5), NARROW, accumulators=1),
    "dense": lambda: simulate_dense_product(integers(12, 6), integers(6, 12), Mesh(3, 3), NARROW),
    "matrix-vector": lambda: simulate_matrix_vector(
        integers(9, 20), integers(20), Mesh(3, 5), SILICON
    ),
    "tree": lambda: simulate_tree_all_reduce(integers(15, 9), Mesh(3, 5), NARROW),
    "ring": lambda: simulate_ring_all_reduce(integers(12, 24), Mesh(3, 4), NARROW),
    "solver": lambda: simulate_solver("bicgstab", GRID, STENCIL, NARROW, 2),
}
RECORDED = {
    "forward": (898.0, 5430, "dcab1a8087b7"),
    "forward, one of all": (2534.145, 7630, "caff687393db"),
    "forward, ring": (1373.96, 6014, "2a93f8f7c1ef"),
    "data gradient": (931.0, 5688, "6b35c977bf27"),
    "weight gradient": (3308.125, 8837, "d31acf7a1e65"),
    "dense": (600.88, 336, "835a6f41679b"),
    "matrix-vector": (137.105, 204, "ca5ad0dd0efd"),
    "tree": (152.375, 504, "2bd925707920"),
    "ring": (512.25, 1976, "0b4d59d12b67"),
    "solver": (4076.79, 1939, "3eb870b594d7"),
}
"""Cycles, words times links, and a digest of all else."""


def digest(report: MeshReport) -> str:
    """Return a digest of states, links, queues and the trace."""
    found = hashlib.sha256()
    for values in (report.busy, report.starved, report.blocked, report.link_words):
        found.update(np.ascontiguousarray(values, np.float64).tobytes())
    queues = [(q.row, q.column, q.colour, q.side, q.greatest, q.words) for q in report.queues]
    found.update(repr((sorted(queues), report.words_entered, report.words_delivered)).encode())
    if report.trace is not None:
        for values in (report.trace.states, report.trace.links):
            found.update(np.ascontiguousarray(values, np.float64).tobytes())
    return found.hexdigest()[:12]


@pytest.mark.parametrize("name", RUNS)
def test_run_has_the_cycles_states_and_words_that_were_recorded(name):
    numbers, report = RUNS[name]()
    assert np.isfinite(numbers).all()
    assert (report.cycles, report.hops, digest(report)) == RECORDED[name]


def test_run_in_many_calls_of_the_kernel_is_the_same(monkeypatch):
    monkeypatch.setattr("penstock.wafer.mesh.run._EVENTS_OF_A_CALL", 1)
    _, report = RUNS["forward"]()
    assert (report.cycles, report.hops, digest(report)) == RECORDED["forward"]


@pytest.mark.parametrize("looks", [0, 1])
def test_looking_ahead_changes_nothing(monkeypatch, looks):
    monkeypatch.setattr("penstock.wafer.language.lower._CACHE_BYTES", 0 if looks else 1 << 40)
    for name in ("forward", "weight gradient", "solver"):
        _, report = RUNS[name]()
        assert (report.cycles, report.hops, digest(report)) == RECORDED[name]
