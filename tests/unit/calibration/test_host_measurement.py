"""All measurements become one description; what is measured here takes no time."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numba
import pytest
import torch

from penstock.calibration import HostKey, calibrate, disk_cases, host_measurement, link_cases
from penstock.calibration.disk_device import device_of
from penstock.calibration.link_cases import BOTH, MESSAGE
from penstock.calibration.reference_step import STEP
from penstock.calibration.repetitions import Case, Measured, Prepared, Quantity
from penstock.calibration.shared_cores import SHARED
from penstock.errors import ClusterError
from penstock.machines import FLASH_DEVICE, MachineDescription
from penstock.telemetry import process_memory


def case(part, work, amount, size=1.0, **more):
    return Case(Quantity(part, work, **more), lambda: Prepared(lambda: None, amount, size), most=4)


def quick_cases(_):
    yield case("engine", "operator call", 1e3)
    yield case("engine", "stage call", 1e3)
    for size, layout in product((64.0, 16.0), ("features", "tokens")):
        yield case("engine", "product", 1e9, size, dtype="float32", layout=layout)
    yield case("engine", "pointwise", 1e6)
    yield case("store", "update", 1e6, dtype="8bit")
    yield case("store", "copy", 1e6)


class Links:
    """Connections on which nothing is sent."""

    def cases(self):
        yield case("processes", "shared memory", 3e9, 4096.0)
        yield case("processes", "socket", 1e9, 4096.0)
        yield case("processes", BOTH, 4e9, 4096.0)
        yield case("processes", MESSAGE, 2.0)


class Competing:
    """Another process that computes nothing."""

    def case(self):
        return case("processes", SHARED, 5.0)


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(host_measurement, "processor_cases", quick_cases)
    monkeypatch.setattr(host_measurement, "compile_kernels", lambda on_progress: None)
    monkeypatch.setattr(disk_cases, "FILE_BYTES", 64 << 10)
    monkeypatch.setattr(disk_cases, "_SAMPLE_BYTES", 16 << 10)
    monkeypatch.setattr(disk_cases, "PIECE_BYTES", (4 << 10, 8 << 10))
    monkeypatch.setattr(host_measurement, "process_links", lambda: nullcontext(Links()))
    monkeypatch.setattr(host_measurement, "competing_process", lambda _: nullcontext(Competing()))
    cases = disk_cases.Disk.cases
    monkeypatch.setattr(
        disk_cases.Disk,
        "cases",
        lambda self: [Case(one.quantity, one.prepare, most=3) for one in cases(self)],
    )


def test_the_description_is_that_of_this_host(tmp_path):
    machine = calibrate(30, tmp_path)
    assert MachineDescription.model_validate(machine.model_dump(mode="json")) == machine
    key = HostKey.here()
    assert (machine.kind, machine.engine.is_host, machine.link) == ("host", True, None)
    assert (machine.processor, machine.store.cores) == (key.processor, key.cores)
    assert machine.store.memory == process_memory.total_bytes()
    assert 0 < machine.engine.operator_seconds < 1
    assert 0 < machine.engine.stage_seconds < 1
    curves = [(c.work, c.dtype, c.layout, c.sizes) for c in machine.engine.rates]
    assert curves == [
        ("product", "float32", "features", (16.0, 64.0)),
        ("product", "float32", "tokens", (16.0, 64.0)),
        ("pointwise", "any", "any", (1.0,)),
    ]
    assert [(c.work, c.dtype) for c in machine.store.rates] == [("update", "8bit"), ("copy", "any")]
    assert machine.sources["key"] == str(key)
    assert "median of 3 to 4 repetitions" in machine.sources["rates"]
    assert "too short" not in machine.sources["rates"]


def test_the_disk_is_the_one_that_was_named(tmp_path):
    flash = calibrate(30, tmp_path).store.flash
    found = os.statvfs(tmp_path)
    assert flash.size == found.f_blocks * found.f_frsize
    assert flash.both is not None
    assert [(c.work, c.sizes) for c in flash.rates] == [
        ("flash read", (4096.0, 8192.0)),
        ("flash write", (4096.0, 8192.0)),
    ]


def test_the_device_of_the_disk_is_among_the_sources(tmp_path):
    assert calibrate(30, tmp_path).sources[FLASH_DEVICE] == device_of(tmp_path)


def test_messages_between_processes_have_rates_and_a_latency(tmp_path):
    machine = calibrate(30, tmp_path)
    found = [(c.work, c.sizes) for c in machine.processes.rates]
    assert found == [("shared memory", (4096.0,)), ("socket", (4096.0,))]
    assert machine.processes.both > 0
    assert 0 < machine.processes.seconds < 1


def test_time_of_processes_at_once_is_that_over_one_after_the_other():
    def measured(work, rate, dtype="any"):
        return Measured(Quantity("engine", work, dtype), 1.0, (rate,))

    alone, both = measured(STEP, 4.0, "float32"), measured(SHARED, 3.2)
    assert host_measurement._at_once([alone, measured(STEP, 9.0, "bfloat16"), both]) == 1.25
    assert host_measurement._at_once([alone]) is None
    assert host_measurement._at_once([both]) is None


def test_host_without_a_second_process_is_measured_without_it(tmp_path, monkeypatch):
    def refuse(_):
        raise ClusterError("cannot start another process: no")

    monkeypatch.setattr(host_measurement, "competing_process", refuse)
    notices: list[str] = []
    assert calibrate(30, tmp_path, notice=notices.append).processes.at_once is None
    assert notices == [
        "processes that share the cores were not measured: cannot start another process: no"
    ]


@pytest.mark.parametrize("compiles", [True, False])
def test_progress_never_decreases_from_one_part_of_the_work_to_the_next(
    tmp_path, monkeypatch, compiles
):
    def compile_kernels(on_progress):
        for done in range(4 * compiles):
            on_progress("compiling kernels", done / 3)
        return compiles

    monkeypatch.setattr(host_measurement, "compile_kernels", compile_kernels)
    told: list[tuple[str, float]] = []
    calibrate(0.5, tmp_path, lambda text, share: told.append((text, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] <= 1
    begun = [text.split()[0] for text, _ in told]
    kinds = ["writing", *["compiling"] * compiles, "measuring", "repeating", "starting"]
    assert list(dict.fromkeys(begun)) == kinds


def test_spread_of_figures_that_are_no_curve_is_among_the_sources(tmp_path):
    said = calibrate(30, tmp_path).sources["spread"]
    for work in ("operator call", "stage call", "flash both", BOTH, MESSAGE):
        assert f"{work} ±" in said


def test_host_without_connections_between_processes_is_measured_without_them(tmp_path, monkeypatch):
    def refuse():
        raise ClusterError("cannot listen on 127.0.0.1: no")

    monkeypatch.setattr(host_measurement, "process_links", refuse)
    notices: list[str] = []
    assert calibrate(30, tmp_path, notice=notices.append).processes is None
    assert notices == [
        "messages between processes were not measured: cannot listen on 127.0.0.1: no"
    ]


@pytest.mark.parametrize("answered", [0, 20])
def test_measurements_are_kept_if_the_process_for_links_dies(tmp_path, monkeypatch, answered):
    started: list[int] = []
    fork, exchange = link_cases._forked, link_cases.ProcessLinks._exchange

    def forked(*args):
        started.append(fork(*args))
        return started[0]

    def killed_later(links, *args):
        started.append(0)  # one more exchange
        if len(started) == answered + 2:
            os.kill(started[0], signal.SIGKILL)
        exchange(links, *args)

    monkeypatch.setattr(link_cases, "_forked", forked)
    monkeypatch.setattr(link_cases, "_SAMPLE_BYTES", 1 << 20)
    monkeypatch.setattr(link_cases.ProcessLinks, "_exchange", killed_later)
    monkeypatch.setattr(host_measurement, "process_links", link_cases.process_links)
    monkeypatch.setattr(link_cases, "MESSAGE_BYTES", (256 << 10,))
    notices: list[str] = []
    machine = calibrate(30, tmp_path, notice=notices.append)
    assert machine.processes is None
    assert [c.work for c in machine.store.rates] == ["update", "copy"]
    assert machine.store.flash is not None
    assert len(notices) == 1
    assert notices[0].startswith("messages between processes cannot be measured: ")
    assert notices[0].endswith("; all other figures are kept")


def test_a_file_system_without_direct_io_is_said_to_be_one(tmp_path, monkeypatch):
    said = {}
    for is_direct in (True, False):
        monkeypatch.setattr(
            "penstock.store.flash.ExtentFile.is_direct", property(lambda self, is_=is_direct: is_)
        )
        said[is_direct] = calibrate(30, tmp_path).sources["store.flash"]
    assert said[True].startswith(f"the disk of {tmp_path}, past the page cache")
    assert said[False] == (
        f"the file system of {tmp_path} has no direct I/O: these are rates of the page cache, and "
        "those of its disk are lower"
    )


def test_without_a_named_folder_a_full_disk_is_left_out_with_a_notice(monkeypatch):
    def nearly_full(_):
        return SimpleNamespace(f_bavail=3, f_frsize=4096)

    monkeypatch.setattr(disk_cases.os, "statvfs", nearly_full)
    notices: list[str] = []
    machine = calibrate(30, notice=notices.append)
    assert machine.store.flash is None
    assert "store.flash" not in machine.sources
    assert len(notices) == 1
    assert notices[0].startswith("the disk was not measured: ")
    assert "got 12,288; free some space" in notices[0]


def test_a_budget_that_is_too_short_is_named_in_the_sources(tmp_path):
    machine = calibrate(1e-9, tmp_path)
    assert machine.sources["rates"].endswith(
        "median of 1 repetitions; fewer than 3 of some work: 1e-09 s were too short"
    )


@pytest.mark.parametrize("fails", [False, True])
def test_threads_are_those_of_an_engine_and_are_restored(tmp_path, monkeypatch, fails):
    seen = []

    def watching(_):
        seen.append((torch.get_num_threads(), torch.is_grad_enabled()))
        if fails:
            raise KeyboardInterrupt
        yield from quick_cases(_)

    monkeypatch.setattr(host_measurement, "processor_cases", watching)
    before = torch.get_num_threads(), numba.get_num_threads(), torch.is_grad_enabled()
    try:
        calibrate(30, tmp_path)
    except KeyboardInterrupt:
        assert fails
    assert seen == [(len(os.sched_getaffinity(0)), False)]
    after = torch.get_num_threads(), numba.get_num_threads(), torch.is_grad_enabled()
    assert after == before
    assert list(tmp_path.glob(".tmp*")) == []
