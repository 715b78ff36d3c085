"""The file in which a host's measurements are kept: found again, or measured again."""

from __future__ import annotations

import dataclasses
import os
from importlib import metadata
from pathlib import Path

import pytest
from measured_host import host

from penstock.calibration import (
    BUSY_SPREAD,
    MOST_MEASUREMENTS,
    HostKey,
    keep,
    kept_file,
    kept_machine,
    this_host,
)
from penstock.errors import CorruptionError, StorageError
from penstock.kernels.processor import processor_name
from penstock.machines import FLASH_DEVICE, MachineDescription

KEY = HostKey("A processor", 2, "2.13.0", "0.62.0", "1.abcdef01")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


class Measurement:
    """Stands for a measurement of the host, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_):
        self.count += 1
        return host(rate=float(self.count))


def rate_of(machine):
    return machine.engine.speed.curve("pointwise").at(1)


def test_kept_measurements_are_read_back_as_they_were():
    path = keep(host(), KEY)
    assert path == kept_file(KEY)
    found = kept_machine(KEY)
    assert found.sources == {"rates": "measured", "key": str(KEY)}
    assert found.model_copy(update={"sources": host().sources}) == host()


def test_nothing_is_found_before_a_measurement():
    assert kept_machine(KEY) is None


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("processor", "Another processor"),
        ("cores", 4),
        ("torch", "2.14.0"),
        ("numba", "0.63.0"),
        ("form", "2.abcdef01"),
    ],
)
def test_another_processor_or_version_does_not_find_them(field, other):
    keep(host(), KEY)
    assert kept_machine(dataclasses.replace(KEY, **{field: other})) is None


def test_the_key_of_this_host_names_what_is_installed():
    key = HostKey.here()
    assert (key.torch, key.numba) == (metadata.version("torch"), metadata.version("numba"))
    assert key.cores == len(os.sched_getaffinity(0))
    assert key.processor == processor_name() != ""
    assert HostKey.here() == key


def test_a_host_is_measured_once():
    measurement, notices = Measurement(), []
    for _ in range(3):
        machine = this_host(key=KEY, measure=measurement, notice=notices.append)
        assert rate_of(machine) == 1.0
    assert measurement.count == 1
    (notice,) = notices
    assert notice == (
        "this host was not measured before with these versions of its libraries; measuring it "
        "now, once for all plans, which takes some minutes. Ctrl-C stops it safely, and nothing is "
        "kept; `--machine NAME` plans for a described machine without it"
    )


@pytest.mark.parametrize("spread", [0.0, BUSY_SPREAD, BUSY_SPREAD + 0.01])
def test_each_use_of_measurements_of_a_busy_host_says_so(spread):
    notices: list[str] = []
    for _ in range(2):
        this_host(key=KEY, measure=lambda *given: host(spread=spread), notice=notices.append)
    busy = [notice for notice in notices if notice.startswith("the host was busy")]
    assert len(busy) == 2 * (spread > BUSY_SPREAD)
    assert all("Run `penstock calibrate --forget` when the host is idle" in one for one in busy)


def test_another_torch_measures_again():
    measurement = Measurement()
    newer = dataclasses.replace(KEY, torch="2.14.0")
    for key, expected in ((KEY, 1.0), (newer, 2.0), (KEY, 1.0), (newer, 2.0)):
        machine = this_host(key=key, measure=measurement, notice=lambda text: None)
        assert rate_of(machine) == expected


def damaged(kind):
    path = kept_file(KEY)
    content = path.read_bytes()
    if kind == "flipped bit":
        place = len(content) // 2
        content = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    elif kind == "cut":
        content = content[: len(content) // 2]
    elif kind == "empty":
        content = b""
    elif kind == "not text":
        content = bytes(range(256)) * 4
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["flipped bit", "cut", "empty", "not text"])
def test_a_damaged_file_is_measured_again_with_a_notice(kind):
    measurement, notices = Measurement(), []
    keep(host(), KEY)
    damaged(kind)
    with pytest.raises(CorruptionError, match="the file has changed since it was written"):
        kept_machine(KEY)
    machine = this_host(key=KEY, measure=measurement, notice=notices.append)
    assert (rate_of(machine), measurement.count) == (1.0, 1)
    assert str(kept_file(KEY)) in notices[0]
    assert "the file has changed since it was written; measuring it now" in notices[0]
    assert rate_of(this_host(key=KEY, measure=measurement, notice=notices.append)) == 1.0
    assert measurement.count == 1


def test_a_file_of_another_host_is_refused():
    other = dataclasses.replace(KEY, cores=64)
    kept_file(other).parent.mkdir(parents=True)
    kept_file(other).write_bytes(keep(host(), KEY).read_bytes())
    with pytest.raises(CorruptionError) as refused:
        kept_machine(other)
    assert str(refused.value) == (
        f"{kept_file(other)}: expected measurements of {other}, got those of {KEY}"
    )


def test_a_sealed_file_that_is_no_machine_is_refused():
    import xxhash

    text = b"name: here\n"
    path = keep(host(), KEY)
    seal = f"# penstock calibrate, checksum {xxhash.xxh3_128_hexdigest(text)}\n"
    path.write_bytes(seal.encode() + text)
    with pytest.raises(CorruptionError, match="missing key; add it"):
        kept_machine(KEY)


def test_a_folder_that_cannot_be_written_does_not_lose_the_measurement(cache):
    (cache / "penstock").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="cannot keep the measurements of this host: "):
        keep(host(), KEY)
    notices: list[str] = []
    machine = this_host(key=KEY, measure=Measurement(), notice=notices.append)
    assert rate_of(machine) == 1.0
    assert len(notices) == 2
    assert "make that folder, or set XDG_CACHE_HOME to another folder" in notices[1]


def test_an_error_while_writing_leaves_the_old_file(monkeypatch):
    keep(host(rate=5.0), KEY)

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.calibration.kept_measurements.os.replace", refuse)
    with pytest.raises(StorageError, match="No space left on device"):
        keep(host(rate=6.0), KEY)
    assert rate_of(kept_machine(KEY)) == 5.0
    names = sorted(path.name for path in kept_file(KEY).parent.iterdir())
    assert names == [f"{kept_file(KEY).stem}.1.yaml", kept_file(KEY).name]


# --- several measurements -------------------------------------------------------------------------


def test_medians_of_the_last_five_measurements_count():
    for rate, median in ((5.0, 5.0), (1.0, 3.0), (9.0, 5.0), (2.0, 3.5), (3.0, 3.0), (4.0, 3.0)):
        keep(host(rate=rate), KEY)
        assert rate_of(kept_machine(KEY)) == median, rate
    assert kept_machine(KEY).sources["measurements"] == "medians of the last 5 measurements"
    assert len(list(kept_file(KEY).parent.iterdir())) == MOST_MEASUREMENTS + 1


def with_disk(rate, device):
    whole = host().model_dump()
    whole["store"]["flash"]["rates"][0]["rates"] = (rate,)
    whole["sources"][FLASH_DEVICE] = device
    return MachineDescription.model_validate(whole)


def test_rates_of_a_disk_are_those_of_the_disk_that_was_measured_last():
    for rate, device, expected, text in (
        (3e9, "nvme", 3e9, None),
        (1e8, "hdd", 1e8, "medians of the last 2 measurements, 1 of them of this disk"),
        (2e8, "hdd", 1.5e8, "medians of the last 3 measurements, 2 of them of this disk"),
        (1e9, "nvme", 2e9, "medians of the last 4 measurements, 2 of them of this disk"),
    ):
        keep(with_disk(rate, device), KEY)
        found = kept_machine(KEY)
        assert found.store.flash.speed.curve("flash read").at(1) == expected
        assert found.sources[FLASH_DEVICE] == device
        assert found.sources.get("measurements") == text


def test_earlier_measurements_can_be_forgotten():
    for rate in (1.0, 2.0):
        keep(host(rate=rate), KEY)
    path = keep(host(rate=10.0), KEY, forgets=True)
    assert rate_of(kept_machine(KEY)) == 10.0
    assert "measurements" not in kept_machine(KEY).sources
    assert len(list(path.parent.iterdir())) == 2


def test_a_damaged_measurement_does_not_count():
    path = keep(host(rate=1.0), KEY)
    keep(host(rate=100.0), KEY)
    path.with_suffix(".2.yaml").write_text("not a machine")
    keep(host(rate=3.0), KEY)
    assert rate_of(kept_machine(KEY)) == 2.0


def test_a_host_is_measured_in_a_process_of_its_own(monkeypatch):
    """The memory that a measurement leaves would count as that of the libraries."""
    commands = []

    def run(command, **_):
        commands.append(command[1:])
        keep(host(rate=7.0, spread=2.0), KEY)

    monkeypatch.setattr("penstock.calibration.kept_measurements.subprocess.run", run)
    notices: list[str] = []
    machine = this_host(key=KEY, notice=notices.append, budget_seconds=5)
    assert "more than 4 times as fast as the median" in notices[-1]
    assert rate_of(machine) == 7.0
    assert commands == [["-m", "penstock", "calibrate", "--forget", "--seconds", "5"]]
