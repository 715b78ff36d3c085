"""`state.json`: the description of a checkpoint, each tensor's file and offset, and file checksums.

Tensors are named `role/weight`: `master/wte.weight` is the weight, `exp_avg/wte.weight` a moment of
the optimizer. A weight is float32, or bfloat16 if it is frozen and its values are exactly bfloat16.
Frozen weights of the run's base folder are omitted; `base` lists them. A sparse weight has no
master: `values/NAME` are its entries, `index/NAME` its mask; `sparse` lists the shapes of sparse
weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, CorruptionError
from penstock.io import Extent, is_sound
from penstock.store import sealed_json, tensor_file
from penstock.store.checkpoint.base import Base, BaseWeight
from penstock.store.files import ANOTHER_CHECKPOINT, CHUNK_BYTES, FileRecord
from penstock.store.roles import INDEX, MASTER, VALUES

STATE_NAME = "state.json"
FORMAT = "penstock checkpoint"
VERSION = 3
_FLOAT32_AND_WHOLE = 1  # checkpoints that contain all weights in float32 still have this version
_DENSE = 2  # checkpoints without sparse weights


@dataclass(frozen=True)
class Place:
    """The location of a tensor: a file of the checkpoint, and a range of bytes in the file."""

    file: str
    extent: Extent


@dataclass(frozen=True)
class CheckpointState:
    """The content of `state.json`; `extra` is the trainer's own table, `best` says whether this was
    the best checkpoint when it was saved, `base` lists the omitted weights, `sparse` the shapes of
    the sparse ones by name."""

    step: int
    files: dict[str, FileRecord]
    tensors: dict[str, Place]
    extra: dict[str, Any]
    best: bool = False
    base: Base | None = None
    sparse: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight in the checkpoint, by name."""
        masters = {name: extent.shape for name, extent in self._masters.items()}
        return {**masters, **self.sparse}

    @property
    def kept(self) -> dict[str, int]:
        """The number of entries of every sparse weight, by name."""
        values = {name: self.tensors[tensor_name(VALUES, name)] for name in self.sparse}
        return {name: place.extent.shape[0] for name, place in values.items()}

    @property
    def base_weights(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight that the checkpoint omits, by name."""
        return {name: w.shape for name, w in self.base.weights.items()} if self.base else {}

    @property
    def bfloat16(self) -> frozenset[str]:
        """Names of the weights that are kept as bfloat16, in the checkpoint or in the base."""
        types = {name: extent.dtype for name, extent in self._masters.items()}
        if self.base is not None:
            types |= {name: weight.dtype for name, weight in self.base.weights.items()}
        return frozenset(name for name, dtype in types.items() if dtype == "BF16")

    @property
    def _masters(self) -> dict[str, Extent]:
        prefix = tensor_name(MASTER, "")
        return {
            name.removeprefix(prefix): place.extent
            for name, place in self.tensors.items()
            if name.startswith(prefix)
        }


def tensor_name(role: str, weight: str) -> str:
    """Return the name of a tensor in the files of a checkpoint."""
    return f"{role}/{weight}"


def state_bytes(state: CheckpointState) -> bytes:
    """Return the content of `state.json` for this state."""
    files = {
        name: {"bytes": record.bytes, "checksums": list(record.checksums)}
        for name, record in state.files.items()
    }
    tensors = {name: _described(place) for name, place in state.tensors.items()}
    is_old = state.base is None and not state.bfloat16
    content = {
        "format": FORMAT,
        "version": VERSION if state.sparse else _FLOAT32_AND_WHOLE if is_old else _DENSE,
        "step": state.step,
        "chunk_bytes": CHUNK_BYTES,
        "files": files,
        "tensors": tensors,
        "extra": state.extra,
        "best": state.best,
        **({} if state.base is None else {"base": _base_described(state.base)}),
        **({"sparse": {n: list(s) for n, s in state.sparse.items()}} if state.sparse else {}),
    }
    return sealed_json.seal(content)


def _base_described(base: Base) -> dict[str, object]:
    weights = {name: [w.dtype, list(w.shape), w.checksum] for name, w in base.weights.items()}
    return {"fingerprint": base.fingerprint, "weights": weights}


def _described(place: Place) -> list[object]:
    extent = place.extent
    return [place.file, extent.dtype, list(extent.shape), extent.begin, extent.end]


def read_state(folder: Path) -> CheckpointState:
    """Read the `state.json` of a checkpoint.

    Args:
        folder: the checkpoint, such as `checkpoints/step-00000100`.

    Raises:
        ConfigError: there is no checkpoint, or a newer penstock wrote it.
        CorruptionError: the file is damaged.
    """
    path = folder / STATE_NAME
    try:
        content = sealed_json.unseal(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder}: not a checkpoint: it has no {STATE_NAME}; a checkpoint is a folder such as "
            "checkpoints/step-00000100. If you deleted it, delete checkpoints/index.json too: the "
            "run then continues from the newest remaining checkpoint"
        ) from error
    match content:
        case {"format": "penstock checkpoint", "version": int(version)} if version > VERSION:
            raise ConfigError(newer_version(path, version, VERSION))
        case {
            "format": "penstock checkpoint",
            "version": int(),
            "step": int(step),
            "chunk_bytes": int(chunk_bytes),
            "files": dict(files),
            "tensors": dict(tensors),
            "extra": dict(extra),
        } if chunk_bytes == CHUNK_BYTES and type(step) is int and 0 <= step < 2**63:
            records = {name: _record(path, name, entry) for name, entry in files.items()}
            places = {name: _place(path, name, entry) for name, entry in tensors.items()}
            for name, place in places.items():
                if place.file not in records:
                    raise _broken(path, f"tensor {name!r} is in the unknown file {place.file!r}")
                if place.extent.end > records[place.file].bytes:
                    raise _broken(path, f"tensor {name!r} reaches beyond the end of {place.file!r}")
            best = content.get("best") is True
            base = _base(path, content.get("base"))
            sparse = _sparse(path, content.get("sparse", {}))
            state = CheckpointState(step, records, places, extra, best, base, sparse)
            for name in state.weights.keys() & state.base_weights.keys():
                raise _broken(path, f"weight {name!r} is both in it and in its base")
            _require_parts(path, state)
            return state
    raise _broken(path, "it does not describe a checkpoint")


def newer_version(path: Path, found: int, known: int) -> str:
    """Return the message for a file of a newer format."""
    return (
        f"{path}: written in format {found} by a newer penstock; this one reads formats up to "
        f"{known}; update penstock to use it"
    )


def _record(path: Path, name: str, entry: object) -> FileRecord:
    match entry:
        case {"bytes": int(size), "checksums": [*checksums]} if (
            type(size) is int
            and 0 <= size < 2**63
            and len(checksums) == -(-size // CHUNK_BYTES)
            and all(isinstance(checksum, str) for checksum in checksums)
            # A name that leaves the folder would let a checkpoint read any file.
            and name == Path(name).name
            and name not in ("", "..")
            and "\0" not in name
        ):
            return FileRecord(size, tuple(checksums))
    raise _broken(path, f"file {name!r} is described by {str(entry)[:100]}")


def _place(path: Path, name: str, entry: object) -> Place:
    match entry:
        case [str(file), str(dtype), [*shape], int(begin), int(end)]:
            sizes: list[Any] = shape
            extent = Extent(dtype, tuple(sizes), begin, end)
            if is_sound(extent) and dtype in tensor_file.DTYPES.values():
                return Place(file, extent)
    raise _broken(path, f"tensor {name!r} is described by {str(entry)[:100]}")


def _base(path: Path, entry: object) -> Base | None:
    match entry:
        case None:
            return None
        case {"fingerprint": str(fingerprint), "weights": dict(weights)}:
            return Base(fingerprint, {n: _base_weight(path, n, w) for n, w in weights.items()})
    raise _broken(path, f"its base is described by {str(entry)[:100]}")


def _base_weight(path: Path, name: str, entry: object) -> BaseWeight:
    match entry:
        case ["F32" | "BF16" as dtype, [*shape], str(checksum)] if all(
            type(length) is int and 0 <= length < 2**63 for length in shape
        ):
            lengths: list[Any] = shape
            return BaseWeight(dtype, tuple(lengths), checksum)
    raise _broken(path, f"weight {name!r} of its base is described by {str(entry)[:100]}")


def _sparse(path: Path, entry: object) -> dict[str, tuple[int, ...]]:
    match entry:
        case dict(shapes) if all(
            isinstance(shape, list) and all(type(n) is int and 0 < n < 2**63 for n in shape)
            for shape in shapes.values()
        ):
            return {str(name): tuple(shape) for name, shape in shapes.items()}
    raise _broken(path, f"its sparse weights are described by {str(entry)[:100]}")


def _require_parts(path: Path, state: CheckpointState) -> None:
    """Check that a checkpoint has the entries and the mask of every sparse weight, and no
    others."""
    for tensor in state.tensors:
        role, _, name = tensor.partition("/")
        if role in (VALUES, INDEX) and name not in state.sparse:
            raise _broken(path, f"tensor {tensor!r} is not that of a sparse weight")
    for name, shape in state.sparse.items():
        values, index = (state.tensors.get(tensor_name(r, name)) for r in (VALUES, INDEX))
        if values is None or index is None or tensor_name(MASTER, name) in state.tensors:
            raise _broken(path, f"sparse weight {name!r} needs entries and a mask, and no master")
        kept, codes = values.extent, index.extent
        if (kept.dtype, codes.dtype, len(kept.shape), len(codes.shape)) != ("F32", "U8", 1, 1):
            raise _broken(path, f"sparse weight {name!r} has entries or a mask of another type")
        if not 0 < kept.shape[0] <= math.prod(shape):
            raise _broken(
                path, f"sparse weight {name!r} of shape {list(shape)} has {kept.shape[0]} entries"
            )


def _broken(path: Path, what: str) -> CorruptionError:
    return CorruptionError(f"{path}: {what}; {ANOTHER_CHECKPOINT}")
