"""The record of the configuration in a run's folder, `RUN/config.yaml`, and the rules for resuming.

A run with a trained step resumes only under a configuration that leads to the same bits. A folder
without one contains nothing that could be lost, and training starts from step 0.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from penstock.config.deciding_keys import check_resumable, trajectory
from penstock.config.document import MAX_BYTES, read
from penstock.config.problems import Origin
from penstock.config.root import Config
from penstock.errors import ConfigError, CorruptionError, StorageError
from penstock.io import durable, file_in_place, read_plain

FILE_NAME = "config.yaml"
_SEAL = b"# checksum of the lines above: "
RecordedExtra = Callable[[Path], Mapping[str, Any] | None]
"""`penstock.store.flash.recorded_extra`, which modules of `penstock.config` cannot import."""


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether a run's folder contains at least one finished checkpoint."""
    return any((run_dir / "checkpoints").glob("step-*/state.json"))


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run, with a record and the metrics of its steps."""
    return (folder / FILE_NAME).is_file() and (folder / "metrics.jsonl").is_file()


def check_run(config: Config, recorded_extra: RecordedExtra, fresh: bool = False) -> bool:
    """Return whether training would resume; raise `ConfigError` if it must not start.

    `recorded_extra` returns the data kept with the last durable step of a store on flash, and is
    called only if there is a store. With `fresh` the run's folder must be new or empty: existing
    files are never deleted.
    """
    folder = config.run.dir
    if (file := file_in_place(folder)) is not None:
        raise ConfigError(f"run.dir: expected a folder, got the file {file}; choose another")
    if fresh and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"run.dir: expected a new or empty folder with --fresh, but {folder} holds "
            f"{_contents(folder)}; move it away, or choose another with run.dir=FOLDER"
        )
    flash = config.store.flash.path
    if not has_checkpoint(folder) and not (
        flash is not None and _is_trained(flash, recorded_extra)
    ):
        return False
    if (folder / FILE_NAME).exists():
        check_resumable(config, trajectory(load_run(folder)))
    return True


def _is_trained(flash: Path, recorded_extra: RecordedExtra) -> bool:
    """Return whether a store on flash has a trained step; initial weights have no trajectory."""
    return _holds_store(flash) and "trajectory" in (recorded_extra(flash) or {})


def _holds_store(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("journal", "shards.json"))


def write_record(config: Config) -> Path:
    """Write the configuration atomically into the run's folder; return its path."""
    path = config.run.dir / FILE_NAME
    text = config.dump_yaml().encode()
    try:
        durable.make_folder(path.parent)
        durable.replace_file(path, text + _SEAL + _checksum(text) + b"\n")
    except OSError as error:
        raise StorageError(
            f"{path}: cannot write it: {error.strerror}; choose another with run.dir=FOLDER"
        ) from error
    return path


def verify_record(folder: Path) -> None:
    """Raise `CorruptionError` if a run's record has changed since it was written.

    A record that was written by hand, or by an older release, has no checksum.
    """
    path = folder / FILE_NAME
    try:
        text, seal, found = read_plain(path, MAX_BYTES).rpartition(_SEAL)
    except OSError:
        return  # `load_run` reports the problem instead
    expected, actual = found.rstrip(b"\n"), _checksum(text)
    if seal and expected != actual:
        raise CorruptionError(
            f"{path} is corrupt between byte 0 and {len(text)}: checksum {actual.decode()}, "
            f"expected {expected.decode(errors='replace')}; if it was edited by hand, delete its "
            "last line, else restore the file from a copy"
        )


def _checksum(text: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(text).encode()


def load_run(folder: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of an existing run, even if its folder has been moved.

    Raises `ConfigError` if the folder is no run.
    """
    folder = Path(folder)
    path = folder / FILE_NAME
    if not folder.is_dir():
        raise no_such_run(folder)
    if not path.is_file():
        raise ConfigError(
            f"{folder}: expected a run, which has a {FILE_NAME}; it holds {_contents(folder)}"
            f"{_hint(folder)}"
        )
    data, lines = read(path)
    if not data:
        raise ConfigError(
            f"{path} is empty, so it is damaged; delete it and repeat the command that started the "
            "run: it resumes, and writes the file again"
        )
    _follow(data, folder)
    return Config.from_mapping(data, overrides, Origin(name=str(path), lines=lines))


def _hint(folder: Path) -> str:
    """Return what to give instead of a folder that is no run; empty if there is no hint."""
    whole = folder.resolve()
    for above in (whole.parent, whole.parent.parent):
        if _has_record(above):
            return f"; name the run: {above}"
    if _holds_store(folder):
        return "; name the run whose store.flash.path this is"
    if (folder / "dataset.json").is_file():
        return "; this is a data set: name a run that was trained on it"
    if (folder / "state.json").is_file():
        return "; this is a checkpoint: name the run that wrote it"
    if (folder / "adapter_config.json").is_file():
        return "; these are exported adapters: name the run that they were exported from"
    if any(folder.glob("*.safetensors")):
        return (
            "; this is a model's folder: name the run that it was exported from, or load it with "
            "transformers"
        )
    runs = sorted(filter(_has_record, (path.parent for path in folder.glob(f"*/{FILE_NAME}"))))
    return f"; name one of the runs in it, such as {runs[0]}" if runs else ""


def _has_record(folder: Path) -> bool:
    """Return whether a folder has the record of a run, and no other file of that name."""
    if is_run(folder):
        return True  # perhaps of an older release, whose records have no checksum
    try:
        return _SEAL in read_plain(folder / FILE_NAME, MAX_BYTES)
    except OSError:
        return False


def no_such_run(path: Path) -> ConfigError:
    """Return the error for a path, given as a run, that is not a folder.

    For a configuration file it names the folder of the file's run.
    """
    if not path.is_file():
        return ConfigError(f"{path}: no such run; expected the folder that run.dir named")
    expected = f"{path}: expected the folder of a run, got a file"
    if path.suffix not in (".yaml", ".yml"):
        return ConfigError(f"{expected}; give the folder that run.dir named")
    run = read(path)[0].get("run")
    named = run.get("dir") if isinstance(run, dict) else None
    folder = Path(named) if isinstance(named, str) else default_run_dir(path)
    missing = "" if folder.is_dir() else ", which does not exist yet"
    return ConfigError(
        f"{path}: expected the folder of a run, got a configuration file; the folder of its run is "
        f"{folder}{missing}"
    )


def default_run_dir(path: Path) -> Path:
    """Return the folder of a run whose configuration file does not set run.dir."""
    return Path("runs", path.stem)


def recorded_flash(folder: Path) -> Path | None:
    """Return the `store.flash.path` of the run's last training, None if there was none."""
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    data, _ = read(path)
    _follow(data, folder)
    match data:
        case {"store": {"flash": {"path": str(flash)}}}:
            return Path(flash)
    return None


def _follow(data: dict, folder: Path) -> None:
    """Redirect a record's paths into the run's folder, if they were inside its old location."""
    match data:
        case {"run": {"dir": str(recorded)} as run}:
            run["dir"] = str(folder)
        case _:
            return
    store = data.get("store")
    for section in (data.get("data"), store.get("flash") if isinstance(store, dict) else None):
        if not isinstance(section, dict):
            continue
        path = section.get("path")
        if isinstance(path, str) and Path(path).is_relative_to(recorded):
            section["path"] = str(folder / Path(path).relative_to(recorded))


def _contents(folder: Path) -> str:
    names = sorted(item.name for item in folder.iterdir())
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return shown or "nothing"
