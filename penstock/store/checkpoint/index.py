"""The list of a run's checkpoints: the newest, the best, and the checkpoints to delete.

`index.json` lists the checkpoints in the order in which they were saved. A folder is a checkpoint
only if the index names it; any other folder is left over from a crash during a save. If there is
no index (it was deleted, or the first save was interrupted), the folders themselves are the list:
a folder gets its final name only when all its files are on disk.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import ConfigError, CorruptionError, StorageError
from penstock.io import durable, failpoints
from penstock.store import sealed_json
from penstock.store.checkpoint.state import STATE_NAME, newer_version, read_state
from penstock.store.files import remove_folder

INDEX_NAME = "index.json"

_INDEX_VERSION = 1
_FOLDER_NAME = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True)
class Index:
    """The checkpoints of a run, oldest first, by folder name, and the name of the best one.

    `retired` are folders that are no longer checkpoints and will be deleted. The index records them
    before the deletion, so that they are deleted even after a crash.
    """

    folders: tuple[str, ...]
    best: str | None
    retired: tuple[str, ...] = ()

    def with_new(self, name: str, best: bool, keep_last: int) -> "Index":
        """Return the index after `name` was saved and old checkpoints were retired."""
        best_name = name if best else self.best
        folders = (*self.folders, name)
        kept = tuple(f for f in folders if f in folders[-keep_last:] or f == best_name)
        dropped = tuple(f for f in folders if f not in kept)
        return Index(kept, best_name, (*self.retired, *dropped))


def step_of(name: str) -> int:
    """Return the step in a checkpoint's folder name."""
    match = _FOLDER_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint, such as step-00000100")
    return int(match[1])


def fresh_name(index: Index, step: int) -> str:
    """Return a folder name for `step` that no listed checkpoint has: checkpoints are never
    overwritten."""
    name = f"step-{step:08d}"
    attempt = 0
    while name in index.folders or name in index.retired:
        attempt += 1
        name = f"step-{step:08d}-{attempt}"
    return name


def read_index(checkpoints: Path) -> Index:
    """Return the checkpoints in the folder `checkpoints`; the folder may not exist yet.

    Raises:
        CorruptionError: the index is damaged, or names a folder that is not a checkpoint.
        ConfigError: a newer penstock wrote it.
    """
    path = checkpoints / INDEX_NAME
    try:
        content = sealed_json.unseal(path)
    except FileNotFoundError:
        complete = _complete_folders(checkpoints)
        return Index(complete, _best_of(checkpoints, complete))
    except CorruptionError as error:
        raise CorruptionError(
            f"{error}; delete the file: Penstock then uses the folders of the checkpoints"
        ) from error
    match content:
        case {"version": int(version)} if version > _INDEX_VERSION:
            raise ConfigError(newer_version(path, version, _INDEX_VERSION))
        case {"folders": [*folders], "best": best, "retired": [*retired]} if (
            all(
                isinstance(name, str) and _FOLDER_NAME.fullmatch(name) for name in folders + retired
            )
            and (best is None or best in folders)
            and _each_once(folders + retired)
        ):
            still_there = (name for name in retired if (checkpoints / name).exists())
            return Index(tuple(folders), best, tuple(still_there))
    raise CorruptionError(
        f"{path}: expected a list of checkpoints; delete the file: Penstock then uses the folders "
        "of the checkpoints"
    )


def _each_once(names: list[str]) -> bool:
    """A folder that is both listed and retired would be deleted while the run still needs it."""
    return len(set(names)) == len(names)


def _complete_folders(checkpoints: Path) -> tuple[str, ...]:
    found = []
    for path in checkpoints.glob("step-*"):
        match = _FOLDER_NAME.fullmatch(path.name)
        if match and (path / STATE_NAME).is_file():
            found.append((int(match[1]), int(match[2] or 0), path.name))
    return tuple(name for _, _, name in sorted(found))


def _best_of(checkpoints: Path, folders: tuple[str, ...]) -> str | None:
    """Return the newest folder whose state says that it was the best when it was saved."""
    for name in reversed(folders):
        try:
            if read_state(checkpoints / name).best:
                return name
        except (ConfigError, CorruptionError):
            continue  # opening this checkpoint reports the damage
    return None


def write_index(checkpoints: Path, index: Index) -> None:
    """Replace the list of checkpoints by `index`, atomically under crashes."""
    content = {
        "version": _INDEX_VERSION,
        "folders": list(index.folders),
        "best": index.best,
        "retired": list(index.retired),
    }
    durable.replace_file(checkpoints / INDEX_NAME, sealed_json.seal(content), "index")


def remove_retired(checkpoints: Path, index: Index) -> None:
    """Delete the folders that `index` has retired; `index` must be on disk.

    Raises:
        StorageError: the operating system refused; all checkpoints are complete nevertheless.
    """
    for name in index.retired:
        failpoints.point("checkpoint.before_remove")
        try:
            remove_folder(checkpoints / name)
        except OSError as error:
            raise StorageError(
                f"{checkpoints / name}: cannot delete this old checkpoint: {error.strerror}; "
                f"the new one, {index.folders[-1]}, is complete; delete the old one by hand"
            ) from error


def find_checkpoint(checkpoints: Path, which: Literal["latest", "best"] | int) -> Path | None:
    """Return the folder of a checkpoint; None if `which` is the latest and there is no checkpoint.

    Args:
        checkpoints: the folder in which a run keeps its checkpoints.
        which: the latest, the best, or the latest of a step.

    Raises:
        ConfigError: there is no best checkpoint, or no checkpoint of that step.
    """
    index = read_index(checkpoints)
    if which == "latest":
        return checkpoints / index.folders[-1] if index.folders else None
    if which == "best":
        if index.best is not None:
            return checkpoints / index.best
        raise ConfigError(f"{checkpoints}: no checkpoint is marked as the best; use the latest")
    for name in reversed(index.folders):
        if step_of(name) == which:
            return checkpoints / name
    have = ", ".join(str(step_of(name)) for name in index.folders) or "none"
    raise ConfigError(f"{checkpoints}: no checkpoint of step {which}; there are: {have}")
