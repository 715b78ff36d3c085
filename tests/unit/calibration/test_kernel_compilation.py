"""Kernels of the measurements are compiled by workers before the first measurement."""

from __future__ import annotations

import pytest

from penstock.calibration import kernel_compilation
from penstock.calibration.kernel_compilation import cases_by_quantity, compile_kernels, completed
from penstock.calibration.processor_cases import processor_cases
from penstock.calibration.repetitions import Quantity
from penstock.calibration.sparse_cases import small_choices

KINDS = list(cases_by_quantity())
CHECKSUM, RECEIVE = (
    KINDS.index(Quantity("store", *what)) for what in (("checksum",), ("receive", "float32"))
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_compilation, "code_folder", lambda: tmp_path)
    monkeypatch.setattr(kernel_compilation.os, "sched_getaffinity", lambda _: {0, 1})
    return tmp_path


@pytest.fixture
def started(monkeypatch):
    """Workers that complete all cases but those that are `lost`, and the arguments of each use."""
    uses = []

    def complete(numbers, workers):
        uses.append((sorted(numbers), workers))
        yield from range(len(numbers) + 1 - complete.lost)

    complete.lost = 0
    monkeypatch.setattr(kernel_compilation, "completed", complete)
    return complete, uses


def test_every_kind_of_work_has_a_case():
    assert set(KINDS) == {case.quantity for case in processor_cases(small_choices())}


def test_kernels_are_compiled_once(started):
    _, uses = started
    told = []
    for _ in range(2):
        compile_kernels(lambda text, share: told.append((text, share)))
    assert uses == [(list(range(len(KINDS))), 2)]
    assert told[0] == ("compiling kernels", 0.0)
    assert told[-1] == ("compiling kernels", 1.0)


def test_cases_that_no_worker_completed_are_compiled_by_the_next_call(started):
    complete, uses = started
    for complete.lost in (1, 0, 0):
        compile_kernels(lambda text, share: None)
    assert len(uses) == 2


@pytest.mark.parametrize("what", ["one core", "no folder"])
def test_nothing_is_compiled_where_it_would_not_help(started, monkeypatch, what):
    if what == "one core":
        monkeypatch.setattr(kernel_compilation.os, "sched_getaffinity", lambda _: {0})
    else:
        monkeypatch.setattr(kernel_compilation, "code_folder", lambda: None)
    compile_kernels(lambda text, share: None)
    assert started[1] == []


def test_workers_leave_machine_code(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "code"))
    assert list(completed(bytes([RECEIVE, CHECKSUM]), 2)) == [0, 1, 2]
    assert list((tmp_path / "code").rglob("*.nbc"))


def test_worker_that_fails_leaves_the_rest_to_others():
    *_, last = completed(bytes([len(KINDS), CHECKSUM]), 2)
    assert last == 1
