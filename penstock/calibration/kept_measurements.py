"""The measurements of this host, kept in the user's cache folder.

A file is named for what its figures depend on: processor, cores, libraries, and what is measured.
After a change of one of these, the file is not found, and the host is measured again. The first
line of the file, a comment, is a checksum of the others. The file is a machine file as any other.
Its figures are the medians of the last measurements, each of which has a file beside it; those of
the disk are medians of the measurements of the disk that was measured last.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from penstock.calibration.busy_host import busy_note
from penstock.calibration.host_key import KEY, HostKey, kept_file
from penstock.calibration.measured_runs import accuracy_of, kept_runs, runs_file
from penstock.calibration.repetitions import OnProgress
from penstock.errors import ConfigError, CorruptionError, PenstockError, StorageError
from penstock.io import durable, read_plain, write_advice
from penstock.machines import (
    MachineDescription,
    dump,
    load_machine,
    median_machine,
    of_last_disk,
)

MOST_MEASUREMENTS = 5
"""Older ones are forgotten."""

_MAX_BYTES = 1 << 20
_PREPARATION_SECONDS = 60.0  # 17 to 31 measured for what is repeated, 21 for the second process
_SEAL = "# penstock calibrate, checksum "
Notice = Callable[[str], None]


def keep(machine: MachineDescription, key: HostKey, *, forgets: bool = False) -> Path:
    """Keep a measurement of a host; an error leaves the old file.

    Args:
        forgets: whether earlier measurements no longer count.

    **Returns:** the file that has the medians of the last measurements.

    Raises:
        StorageError: the system refuses to write it.
    """
    path = kept_file(key)
    earlier = {} if forgets else _earlier(key)
    numbers = sorted(earlier)[-(MOST_MEASUREMENTS - 1) :]
    number = max(numbers, default=0) + 1
    measured = [*(earlier[one] for one in numbers), machine]
    sources = {**machine.sources, KEY: str(key)}
    if earlier:
        sources["measurements"] = _about_medians(measured)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(_numbered(path, number), machine, {**machine.sources, KEY: str(key)})
        runs_file(key).unlink(missing_ok=True)  # their predictions came from other measurements
        _write(path, median_machine(measured), sources)
        for old in _all_numbered(path):
            if old not in (*numbers, number):
                _numbered(path, old).unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_keep(path, error) from error
    return path


def require_writable(key: HostKey) -> None:
    """Check that measurements of a host can be kept, before they are made.

    Raises:
        StorageError: the system refuses to write in their folder.
    """
    path = kept_file(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _cannot_keep(path, error) from error


def _cannot_keep(path: Path, error: OSError) -> StorageError:
    advice = write_advice(error, "free some space there", "make that folder")
    return StorageError(
        f"{path}: cannot keep the measurements of this host: {error.strerror or error}; "
        f"{advice}, or set XDG_CACHE_HOME to another folder"
    )


def _about_medians(measured: Sequence[MachineDescription]) -> str:
    text = f"medians of the last {len(measured)} measurements"
    of_disk = len(of_last_disk(measured))
    return text if of_disk in (0, len(measured)) else f"{text}, {of_disk} of them of this disk"


def _write(path: Path, machine: MachineDescription, sources: dict[str, str]) -> None:
    text = dump(machine.model_copy(update={"sources": sources})).encode()
    sealed = f"{_SEAL}{xxhash.xxh3_128_hexdigest(text)}\n".encode() + text
    # Nothing is synced: a file that a crash has torn fails its checksum, and is measured again.
    temporary = path.with_name(f"{durable.TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        temporary.write_bytes(sealed)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _earlier(key: HostKey) -> dict[int, MachineDescription]:
    """Return the measurements of a host by number; a damaged one does not count."""
    path, found = kept_file(key), {}
    for number in _all_numbered(path):
        with contextlib.suppress(PenstockError):
            machine = _read(_numbered(path, number), key)
            if machine is not None:
                found[number] = machine
    return found


def _numbered(path: Path, number: int) -> Path:
    return path.with_suffix(f".{number}.yaml")


def _all_numbered(path: Path) -> list[int]:
    names = (other.name.split(".") for other in path.parent.glob(f"{path.stem}.*.yaml"))
    return sorted(int(parts[-2]) for parts in names if parts[-2].isdecimal())


def kept_machine(key: HostKey) -> MachineDescription | None:
    """Return the kept measurements of a host; None if there are none.

    `accuracy` is that of the runs that were measured since.

    Raises:
        CorruptionError: the file is damaged, or those of another host.
        StorageError: the system cannot read the file.
    """
    machine = _read(kept_file(key), key)
    if machine is None:
        return None
    accuracy = accuracy_of(kept_runs(key), str(runs_file(key)))
    return machine.model_copy(update={"accuracy": accuracy})


def _read(path: Path, key: HostKey) -> MachineDescription | None:
    """Return the measurements in a file; None if there is no such file."""
    try:
        data = read_plain(path, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror or error}") from error
    first, _, text = data.partition(b"\n")
    expected, found = first.decode(errors="replace"), f"{_SEAL}{xxhash.xxh3_128_hexdigest(text)}"
    if expected != found:
        raise CorruptionError(
            f"{path}: expected {found!r} as the first line, got {expected[:80]!r}: the file has "
            "changed since it was written"
        )
    try:
        machine = load_machine(path)
    except ConfigError as error:
        raise CorruptionError(str(error)) from error
    if machine.sources.get(KEY) != str(key):
        raise CorruptionError(
            f"{path}: expected measurements of {key}, got those of {machine.sources.get(KEY)}"
        )
    return machine


def is_kept(machine: MachineDescription) -> bool:
    """Tell whether a description is the kept one of a host, to which runs add their times."""
    return KEY in machine.sources


def this_host(
    *,
    budget_seconds: float = 30,
    notice: Notice = lambda text: print(text, file=sys.stderr),
    on_progress: OnProgress = lambda text, share: None,
    key: HostKey | None = None,
    measure: Callable[..., MachineDescription] | None = None,
) -> MachineDescription:
    """Return the description of this host: as it was measured, else measured now and kept.

    Args:
        budget_seconds, on_progress: of the measurement (`calibrate`).
        notice: called with a sentence for the user, if the host is measured; with another one if
            the host was busy while it was measured, now or earlier.
        key: of this host.
        measure: measures it; None: `calibrate`, in a process of its own. The memory that a
            measurement leaves in a process would count as that of the libraries, which plans
            measure.
    """
    key = key or HostKey.here()
    reason = "this host was not measured before with these versions of its libraries"
    try:
        machine = kept_machine(key)
        if machine is not None:
            _notice_of_busy(machine, notice)
            return machine
    except PenstockError as error:
        reason = str(error)
    notice(
        f"{reason}; measuring it now, once for all plans, which takes some minutes. Ctrl-C stops "
        "it safely, and nothing is kept; `--machine NAME` plans for a described machine without it"
    )
    machine = _measured_apart(key, budget_seconds) if measure is None else None
    if machine is None:
        from penstock.calibration.host_measurement import calibrate

        machine = (measure or calibrate)(budget_seconds, None, on_progress, notice)
        try:
            keep(machine, key, forgets=True)
        except StorageError as error:
            notice(str(error))
    _notice_of_busy(machine, notice)
    return machine


def _notice_of_busy(machine: MachineDescription, notice: Notice) -> None:
    if (note := busy_note(machine)) is not None:
        notice(note)


def measuring_time(budget_seconds: float) -> str:
    """Return a sentence on how long a measurement of this host takes."""
    most = budget_seconds + _PREPARATION_SECONDS
    return (
        f"measurements take about {budget_seconds:g} to {most:g} s, longer if the host is busy; at "
        "the first use, kernels are compiled before them, which takes some minutes"
    )


def _measured_apart(key: HostKey, budget_seconds: float) -> MachineDescription | None:
    """Measure this host by `penstock calibrate`; return None if that keeps nothing."""
    command = [sys.executable, "-m", "penstock", "calibrate", "--forget"]
    command += ["--seconds", f"{budget_seconds:g}"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    with contextlib.suppress(PenstockError):
        return kept_machine(key)
    return None
