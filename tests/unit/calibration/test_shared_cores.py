"""Two processes that compute at once: what a sample is, and what is left behind."""

import subprocess
import sys

import pytest

from penstock.calibration import shared_cores
from penstock.calibration.repetitions import measure
from penstock.calibration.shared_cores import SHARED, competing_process
from penstock.errors import ClusterError


@pytest.mark.long  # imports PyTorch and compiles a model in another process
def test_sample_is_a_step_of_each_process():
    with competing_process("torch") as other:
        (measured,) = measure([other.case()], 2.0)
        process = other._process
    assert (measured.quantity.part, measured.quantity.work) == ("processes", SHARED)
    assert measured.rate > 0
    assert process.returncode is not None


def in_the_place_of_the_process(monkeypatch, program: str) -> None:
    start = subprocess.Popen

    def other(command, **more):
        return start([sys.executable, "-c", program], **more)

    monkeypatch.setattr(shared_cores.subprocess, "Popen", other)


def test_process_that_ends_at_once_is_an_error_with_its_exit_code(monkeypatch):
    in_the_place_of_the_process(monkeypatch, "raise SystemExit(3)")
    with (
        pytest.raises(ClusterError, match="it ended with exit code 3"),
        competing_process("torch"),
    ):
        pass


def test_process_that_ends_before_its_step_is_an_error(monkeypatch):
    in_the_place_of_the_process(monkeypatch, "print('ready', flush=True); input()")
    monkeypatch.setattr(shared_cores, "reference_program", lambda *_: None)
    monkeypatch.setattr(shared_cores, "reference_step", lambda _: lambda: None)
    with (
        competing_process("torch") as other,
        pytest.raises(ClusterError, match="expected 'done' of the other process"),
    ):
        other.case().prepare().run()


def test_process_that_cannot_be_started_is_an_error(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shared_cores.subprocess, "Popen", refuse)
    with (
        pytest.raises(ClusterError, match="cannot start another process: Cannot allocate memory"),
        competing_process("torch"),
    ):
        pass


def test_process_that_has_ended_is_one_error_and_not_another_when_it_is_closed(monkeypatch):
    in_the_place_of_the_process(monkeypatch, "print('ready', flush=True)")
    monkeypatch.setattr(shared_cores, "reference_program", lambda *_: None)
    monkeypatch.setattr(shared_cores, "reference_step", lambda _: lambda: None)
    with competing_process("torch") as other:
        other._process.wait()
        with pytest.raises(ClusterError, match="the other process has ended: Broken pipe"):
            other.case().prepare().run()


def test_process_that_says_nothing_is_an_error(monkeypatch):
    in_the_place_of_the_process(monkeypatch, "import time; time.sleep(300)")
    monkeypatch.setattr(shared_cores, "_START_SECONDS", 0.1)
    with (
        pytest.raises(ClusterError, match=r"has not written 'ready' in 0\.1 s"),
        competing_process("torch"),
    ):
        pass


def test_process_ends_with_the_context_whatever_happens_in_it(monkeypatch):
    in_the_place_of_the_process(
        monkeypatch, "import time; print('ready', flush=True); time.sleep(300)"
    )
    with pytest.raises(RuntimeError), competing_process("torch") as process:
        raise RuntimeError
    assert process._process.returncode is not None
