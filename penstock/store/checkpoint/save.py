"""Saving a checkpoint: a crash between any two steps leaves a valid list of checkpoints.

1. The files are written to `.tmp-step-…` and synced, then the folder is synced.
2. The folder is renamed to its final name; its parent folder is synced.
3. `index.json` is replaced: from here on the new checkpoint is the current one.
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
from penstock.store.holding import Holding, home_stages
from penstock.store.interface import SavedState, Store
from penstock.store.roles import Stored, holds_weight

MAX_FILE_BYTES = 4 << 30
"""A stage's tensors continue in another file beyond this size; only a single larger tensor exceeds
it."""

_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk: its folder, its step and the bytes of its tensor files.

    `seconds` is the duration of the whole save.
    """

    folder: Path
    step: int
    bytes: int
    seconds: float


class _IdleStore:
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
    """Apply all pending updates of a store, then save all its weights and optimizer state.

    The save does not copy the model: its memory does not grow with the model.

    Args:
        store: the store to save; `store.step` names the checkpoint.
        checkpoints: the run's folder of checkpoints; created if missing.
        extra: the table that `load_checkpoint` returns; must be representable in JSON.
        best: mark this checkpoint as the best: it is kept until a better one is saved.
        keep_last: how many of the latest are kept, 1 or more; the best is kept besides.
        base: the weights that can be read from the base folder and are omitted.

    Raises:
        StorageError: the disk is full, read-only or failing; the previous checkpoint is unchanged
            and still current, and no partial file remains.
        CorruptionError: the index of the existing checkpoints is damaged.
        NonFiniteError: a weight is NaN or infinite; the previous checkpoint stays current.
    """
    store.flush()
    idle = _IdleStore(store)
    return write_checkpoint(idle, checkpoints, extra, best=best, keep_last=keep_last, base=base)


def checkpoint_bytes(
    program: Holding, roles: Callable[[str], Mapping[str, Stored]], base: Collection[str] = ()
) -> int:
    """Return the bytes of a checkpoint's tensor files, without writing a checkpoint.

    Args:
        program: names the weights.
        roles: returns the arrays of a weight, as `Store.roles`.
        base: the omitted weights.
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
    """Write a state as a checkpoint and make it the current one; as `save_checkpoint`."""
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
            # No index lists a folder of this name: it is left over from a crash between rename and
            # index.
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
    """Return which tensors go into which file: one file per stage, more if it would be too large.

    Weights of the `base` are omitted.
    """
    by_stage: dict[int, list[tuple[tensor_file.Entry, _SavedSource]]] = {}
    for name, home in home_stages(program).items():
        for role, stored in roles(name).items() if name not in base else ():
            entry = tensor_file.Entry(tensor_name(role, name), stored.dtype, stored.shape)
            by_stage.setdefault(home, []).append((entry, _SavedSource(name, role)))
    for tensors in by_stage.values():
        # The weights come first: a reader of the weights alone need not read past them.
        tensors.sort(key=lambda tensor: not holds_weight(tensor[1].role))
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
    sparse = {n: w.shape for n, w in saved.program.weights.items() if w.is_sparse}
    state = CheckpointState(saved.step, files, tensors, extra, best, base, sparse)
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
        if holds_weight(source.role) and not np.isfinite(piece).all():
            raise NonFiniteError(
                f"step {saved.step} is not saved: the update made {source.weight} NaN or infinite; "
                "earlier checkpoints are unchanged. Start a run with a lower "
                "optimizer.learning_rate in another run.dir"
            )
        if holds_weight(source.role):
            weight_format = saved.program.weights[source.weight].format
            piece = saved_values(weight_format, source.weight, piece)
        yield piece


def _withdraw(folder: Path) -> None:
    """Remove all files of a save that failed before the index named it."""
    if folder.exists() and folder.name not in read_index(folder.parent).folders:
        with contextlib.suppress(OSError):
            remove_folder(folder)
