"""`penstock calibrate`: the page, the messages, and where the measurements are kept."""

from __future__ import annotations

import pytest
from command_line import penstock
from measured_host import host

from penstock.calibration import HostKey, host_measurement, keep, kept_file
from penstock.cli.calibrate import _Lines
from penstock.errors import StorageError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def asked(monkeypatch):
    """A measurement that takes no time, and the arguments of its calls."""
    found = []

    def measure(seconds, flash_dir, on_progress, notice):
        found.append((seconds, flash_dir))
        on_progress("measuring product", 0.5)
        notice("the disk was not measured: it is full")
        return host()

    monkeypatch.setattr(host_measurement, "calibrate", measure)
    return found


def words(text):
    return " ".join(text.split())


def test_a_page_of_what_was_measured_is_printed_and_kept(asked, tmp_path):
    done = penstock("calibrate", "--seconds", "5", "--flash-dir", tmp_path)
    assert done.returncode == 0
    assert asked == [(5.0, tmp_path)]
    page = words(done.stdout)
    for line in (
        "A processor, 2 cores; memory 8.00 GiB",
        "product tokens 16, 2048 1, 95 GFLOP/s ±3.10%",
        "sparse product bfloat16 10% kept 20 GFLOP/s ±0.00%",
        "attention 512 tokens 30 GFLOP/s",
        "pointwise 64.0 KiB 1.4 GiB/s",
        "flash write 1.00 MiB 512 MiB/s",
        "4 us per call of an operator, 25 us per stage, micro-batch and sweep",
        "disk of 100 GiB; 1.00 GiB/s reads and writes together",
        f"kept in {kept_file(HostKey.here())}",
    ):
        assert line in page
    assert done.stderr == (
        "measurements take about 5 to 65 s, longer if the host is busy; at the first use, kernels "
        "are compiled before them, which takes some minutes\n"
        "the disk was not measured: it is full\n"
    )
    assert kept_file(HostKey.here()).exists()


def test_show_prints_the_last_measurements_and_measures_nothing(asked):
    keep(host(rate=2**31), HostKey.here())
    done = penstock("calibrate", "--show")
    assert done.returncode == 0
    assert asked == []
    assert "pointwise 64.0 KiB 2 GiB/s" in words(done.stdout)
    assert HostKey.here().form not in done.stdout


def test_measuring_again_shows_medians_and_forget_only_the_last(asked):
    keep(host(rate=2**31), HostKey.here())  # measured now: 1.5e9 bytes per second
    page = words(penstock("calibrate").stdout)
    assert "pointwise 64.0 KiB 1.7 GiB/s ±17.80%" in page
    assert "measurements: medians of the last 2 measurements" in page
    page = words(penstock("calibrate", "--forget").stdout)
    assert "pointwise 64.0 KiB 1.4 GiB/s ±0.00%" in page
    assert "measurements:" not in page


def test_page_of_a_busy_host_advises_to_measure_again_when_idle(asked, monkeypatch):
    assert "note:" not in penstock("calibrate").stdout
    busy = host(spread=7.25)
    monkeypatch.setattr(host_measurement, "calibrate", lambda *given: busy)
    for arguments in (("--forget",), ("--show",)):
        assert penstock("calibrate", *arguments).stdout.endswith(
            "note: the host was busy while it was measured: the fastest measurement of "
            "pointwise was more than 14 times as fast as the median, and predictions from them can "
            "be far off. Run `penstock calibrate --forget` when the host is idle\n"
        )
    assert "over ±100%" in penstock("calibrate", "--show").stdout


def test_show_without_measurements_says_how_to_get_them(asked):
    done = penstock("calibrate", "--show")
    key = HostKey.here()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: this host has no measurements at {kept_file(key)}; run `penstock calibrate` "
        "without --show to measure it\n"
    )


def test_show_of_a_damaged_file_says_how_to_replace_it(asked):
    path = keep(host(), HostKey.here())
    path.write_bytes(path.read_bytes()[:-3])
    done = penstock("calibrate", "--show")
    assert (done.returncode, asked) == (6, [])
    assert done.stderr.endswith(
        "the file has changed since it was written; run `penstock calibrate` without --show to "
        "measure it again\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seconds", "0"), "seconds: expected a number above 0, got 0"),
        (("--seconds", "-3"), "seconds: expected a number above 0, got -3"),
        (
            ("--show", "--forget"),
            "--show and --forget: expected one of them; --forget measures again",
        ),
        (("--seconds", "nan"), "seconds: expected a number above 0, got nan"),
        (
            ("--flash-dir", "nothing"),
            "--flash-dir: expected a folder on the disk to measure, got nothing, which does not "
            "exist",
        ),
        (
            ("--flash-dir", "file"),
            "--flash-dir: expected a folder on the disk to measure, got file, which is not a "
            "folder",
        ),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(tmp_path, arguments, message):
    (tmp_path / "file").touch()
    done = penstock("calibrate", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {message}\n"
    assert not kept_file(HostKey.here()).exists()


def test_folder_in_which_nothing_can_be_kept_is_refused_before_the_measurement(
    asked, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    done = penstock("calibrate")
    assert (done.returncode, asked) == (7, [])
    assert "cannot keep the measurements of this host: Not a directory" in done.stderr


def test_a_disk_that_was_named_and_cannot_be_measured_is_an_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise StorageError("the disk is full")

    monkeypatch.setattr(host_measurement, "measured_disk", refuse)
    done = penstock("calibrate", "--flash-dir", tmp_path)
    assert done.returncode == 7
    assert done.stderr.endswith("\nerror: the disk is full\n")


def test_a_log_gets_a_line_of_progress_every_ten_seconds():
    times, lines = iter([0.0, 4.0, 10.5, 19.0, 21.0]), []
    progress = _Lines(lambda: next(times), lines.append)
    for done in range(4):
        progress("compiling kernels", done / 4)
    assert lines == [
        "calibrate: 25% done after 10 s; now compiling kernels",
        "calibrate: 75% done after 21 s; now compiling kernels",
    ]
