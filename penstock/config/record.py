"""The configuration that a run's folder keeps of itself, `RUN/config.yaml`, and what it allows.

A run that has a checkpoint goes on only under a configuration that leads to the same bits; a
folder without one holds nothing that could be lost, and starts from step 0.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.config.document import read
from penstock.config.problems import Origin
from penstock.config.root import Config
from penstock.errors import ConfigError, StorageError

FILE_NAME = "config.yaml"


def has_checkpoint(run_dir: Path) -> bool:
    """Tell whether a run's folder holds at least one finished checkpoint."""
    return any((run_dir / "checkpoints").glob("step-*/state.json"))


def check_run(config: Config, fresh: bool = False) -> bool:
    """Return whether training would resume, or raise `ConfigError` if it must not go ahead.

    With `fresh` the run's folder must be new or empty: nothing is ever deleted to make it so.
    """
    folder = config.run.dir
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir: expected a folder, got the file {folder}; choose another")
    if fresh and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"run.dir: expected a new or empty folder with --fresh, but {folder} holds "
            f"{_contents(folder)}; move it away, or choose another with run.dir=FOLDER"
        )
    flash = config.store.flash.path
    if not has_checkpoint(folder) and not (
        flash is not None and any((flash / name).exists() for name in ("journal", "shards.json"))
    ):
        return False
    if (folder / FILE_NAME).exists():
        config.check_resumable(load_run(folder).trajectory())
    return True


def write_record(config: Config) -> Path:
    """Write the configuration into the run's folder, aside and renamed; return its path."""
    path = config.run.dir / FILE_NAME
    aside = path.with_name(f".{FILE_NAME}.aside")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)  # a crash may have left it; a link would be followed
        with aside.open("x", encoding="utf-8") as file:
            file.write(config.dump_yaml())
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path}: cannot be written: {error.strerror}; choose another with run.dir=FOLDER"
        ) from error
    return path


def load_run(folder: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of an existing run, wherever its folder has been moved to.

    Raises `ConfigError` if the folder is no run.
    """
    folder = Path(folder)
    path = folder / FILE_NAME
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such run; expected the folder that run.dir named")
    if not path.is_file():
        raise ConfigError(
            f"{folder}: expected a run, which has a {FILE_NAME}; it holds {_contents(folder)}"
        )
    data, lines = read(path)
    if isinstance(data.get("run"), dict):
        recorded_dir = data["run"].get("dir")
        data["run"]["dir"] = str(folder)
        _follow_data(data, recorded_dir, folder)
    return Config.from_mapping(data, overrides, Origin(name=str(path), lines=lines))


def _follow_data(data: dict, recorded_dir: object, folder: Path) -> None:
    """Point data.path into the moved folder where it was inside the folder's old place."""
    section = data.get("data")
    if not isinstance(section, dict) or not isinstance(section.get("path"), str):
        return
    path = Path(section["path"])
    if isinstance(recorded_dir, str) and path.is_relative_to(recorded_dir):
        section["path"] = str(folder / path.relative_to(recorded_dir))


def _contents(folder: Path) -> str:
    names = sorted(item.name for item in folder.iterdir())
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return shown or "nothing"
