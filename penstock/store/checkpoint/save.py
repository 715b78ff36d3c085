"""Writing a checkpoint, in steps that a crash may separate but never spoil.

1. The files go into `.tmp-step-…`, each synced, then the folder itself.
2. The folder gets its name; the folder of checkpoints is synced.
3. `index.json` is replaced: from here on the new checkpoint is the one in force.
4. Checkpoints that the index no longer lists are renamed away and deleted.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import NonFiniteError
from penstock.io import durable, failpoints
from penstock.store import tensor_file
from penstock.store.checkpoint.base import Base
from penstock.store.checkpoint.index import (
    fresh_name,
    read_index,
    remove_retired,
    write_index,
)
from penstock.store.checkpoint.state import (
    STATE_NAME,
    CheckpointState,
    Place,
    state_bytes,
    tensor_name,
)
from penstock.store.codecs import saved_values
from penstock.store.files import (
    ChecksummedFile,
    FileRecord,
    remove_folder,
    remove_temporaries,
    require_space,
    storage_errors,
)
from penstock.store.holding import Holding, homes
from penstock.store.interface import SavedState, Store
from penstock.store.roles import MASTER, Stored

MAX_FILE_BYTES = 4 << 30
"""A stage's tensors go on in another file here; a file exceeds it only for a single tensor."""

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is on disk: its folder, its step and the bytes of its tensor files.

    `seconds` is how long it took from beginning to end.
    """

    folder: Path
    step: int
    bytes: int
    seconds: float


class _AtRest:
    """A store that does not change while it is saved."""

    def __init__(self, store: Store) -> None:
        self.program, self.step, self.roles = store.program, store.step, store.roles
        self._read = store.read

    def pieces(self, name: str, role: str, piece_elements: int) -> Iterator[np.ndarray]:
        count = math.prod(self.roles(name)[role].shape)
        for begin in range(0, count, piece_elements):
            yield self._read(name, role, begin, min(begin + piece_elements, count))


@dataclass(frozen=True)
class _SavedSource:
    weight: str
    role: str


def save_checkpoint(
    store: Store,
    checkpoints: Path,
    extra: dict[str, Any],
    *,
    best: bool = False,
    keep_last: int = 2,
    base: Base | None = None,
) -> SavedCheckpoint:
    """Save all weights and optimizer state of a store, with all pending updates made.

    Holds no copy of the model: what it needs of memory does not grow with it.

    Args:
        store: what to save; `store.step` names the checkpoint.
        checkpoints: the run's folder of checkpoints; made if need be.
        extra: what `load_checkpoint` is to return: a table that JSON can hold.
        best: mark this checkpoint as the best, so that it is kept until a better one comes.
        keep_last: how many of the latest are kept, 1 or more; the best is kept besides.
        base: what can be read elsewhere again, and is left out.

    Raises:
        StorageError: the disk is full, read-only or failing; the previous checkpoint is untouched
            and still in force, and nothing half-written is left.
        CorruptionError: the index of the existing checkpoints is damaged.
        NonFiniteError: a weight is NaN or infinite; the previous checkpoint stays in force.
    """
    store.flush()
    at_rest = _AtRest(store)
    return write_checkpoint(at_rest, checkpoints, extra, best=best, keep_last=keep_last, base=base)


def checkpoint_bytes(
    program: Holding, roles: Callable[[str], Mapping[str, Stored]], base: Collection[str] = ()
) -> int:
    """Return the bytes of a checkpoint's tensor files, without making one.

    Args:
        program: names the weights.
        roles: gives what there is of a weight, as `Store.roles`.
        base: the weights that are left out.
    """
    plan = _plan(program, roles, base)
    return sum(tensor_file.file_bytes(list(entries)) for entries in plan.values())


def write_checkpoint(
    saved: SavedState,
    checkpoints: Path,
    extra: dict[str, Any],
    *,
    best: bool,
    keep_last: int,
    base: Base | None = None,
) -> SavedCheckpoint:
    """Write a state as a checkpoint and put it in force; as `save_checkpoint`."""
    if keep_last < 1:
        raise ValueError(f"keep_last must be 1 or more, not {keep_last}")
    started = time.perf_counter()
    plan = _plan(saved.program, saved.roles, base.weights if base is not None else ())
    needed_bytes = sum(tensor_file.file_bytes(list(entries)) for entries in plan.values())
    with storage_errors(checkpoints, needed_bytes):
        durable.make_folder(checkpoints)
        remove_temporaries(checkpoints)
    before = read_index(checkpoints)
    folder = checkpoints / fresh_name(before, saved.step)
    after = before.with_new(folder.name, best, keep_last)
    with storage_errors(folder, needed_bytes):
        try:
            require_space(folder, needed_bytes)
            # Whatever is there, no index lists it: a crash came between its rename and the index.
            if folder.is_symlink():
                folder.unlink()
            elif folder.exists():
                remove_folder(folder)
            with durable.new_folder(folder, "checkpoint") as temporary:
                failpoints.point("checkpoint.begin")
                state = _write_files(saved, temporary, plan, extra, best, base)
            write_index(checkpoints, after)
        except BaseException:
            _withdraw(folder)
            raise
    remove_retired(checkpoints, after)
    return SavedCheckpoint(folder, saved.step, state.bytes, time.perf_counter() - started)


def _plan(
    program: Holding, roles: Callable[[str], Mapping[str, Stored]], base: Collection[str]
) -> dict[str, dict[tensor_file.Entry, _SavedSource]]:
    """Return which tensors go into which file: one per stage, more where it would be too large.

    Weights of the `base` are left out.
    """
    by_stage: dict[int, list[tuple[tensor_file.Entry, _SavedSource]]] = {}
    for name, home in homes(program).items():
        for role, stored in roles(name).items() if name not in base else ():
            entry = tensor_file.Entry(tensor_name(role, name), stored.dtype, stored.shape)
            by_stage.setdefault(home, []).append((entry, _SavedSource(name, role)))
    for tensors in by_stage.values():
        # The masters first: who wants the weights only need not read past them.
        tensors.sort(key=lambda tensor: tensor[1].role != MASTER)
    plan: dict[str, dict[tensor_file.Entry, _SavedSource]] = {}
    for home, tensors in by_stage.items():
        parts: list[dict[tensor_file.Entry, _SavedSource]] = [{}]
        for entry, source in tensors:
            held_bytes = sum(other.bytes for other in parts[-1])
            if parts[-1] and held_bytes + entry.bytes > MAX_FILE_BYTES:
                parts.append({})
            parts[-1][entry] = source
        for number, part in enumerate(parts):
            suffix = f"-{number}" if number else ""
            plan[f"stage-{home:05d}{suffix}.safetensors"] = {
                entry: part[entry] for entry in tensor_file.in_file_order(part)
            }
    return plan


def _write_files(
    saved: SavedState,
    temporary: Path,
    plan: dict[str, dict[tensor_file.Entry, _SavedSource]],
    extra: dict[str, Any],
    best: bool,
    base: Base | None,
) -> CheckpointState:
    files: dict[str, FileRecord] = {}
    tensors: dict[str, Place] = {}
    for file_name, sources in plan.items():

        def pieces(entry: tensor_file.Entry, sources: Any = sources) -> Iterator[np.ndarray]:
            return _pieces(saved, entry, sources[entry])

        entries = list(sources)
        files[file_name] = tensor_file.write(temporary / file_name, entries, pieces)
        for name, extent in tensor_file.extents(entries).items():
            tensors[name] = Place(file_name, extent)
        failpoints.point("checkpoint.after_file")
    state = CheckpointState(saved.step, files, tensors, extra, best, base)
    file = ChecksummedFile(temporary / STATE_NAME)
    try:
        file.write(state_bytes(state))
        failpoints.point("checkpoint.before_state_sync")
        file.finish()
    finally:
        file.close()
    return state


def _pieces(
    saved: SavedState, entry: tensor_file.Entry, source: _SavedSource
) -> Iterator[np.ndarray]:
    length = _PIECE_BYTES // entry.dtype.itemsize
    for piece in saved.pieces(source.weight, source.role, length):
        if source.role == MASTER and not np.isfinite(piece).all():
            raise NonFiniteError(
                f"step {saved.step} is not saved: the update made {source.weight} NaN or infinite; "
                "the checkpoints before it stand. Start a run with a lower "
                "optimizer.learning_rate in another run.dir"
            )
        if source.role == MASTER:
            weight_format = saved.program.weights[source.weight].format
            piece = saved_values(weight_format, source.weight, piece)
        yield piece


def _withdraw(folder: Path) -> None:
    """Leave no trace of a save that failed before the index named it."""
    if folder.exists() and folder.name not in read_index(folder.parent).folders:
        with contextlib.suppress(OSError):
            remove_folder(folder)
