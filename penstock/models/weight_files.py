"""The weights in a Hugging Face folder: found, validated, and read one at a time.

Headers are read once, when the folder is opened. A weight is read on request, through a buffer of a
few megabytes, and converted in the buffer. (The files are not mapped: mapped pages would count as
the process's memory.) Pickles are never opened. Sparse weights of a packed file
(`packed_tensors.py`) are read like all others, with zeros where the mask keeps no entry.
"""

import json
import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
import xxhash

from penstock.errors import ConfigError, CorruptionError
from penstock.io import Extent, header_length, parse_header
from penstock.kernels.memory import allocate
from penstock.models.finite_weights import refuse_non_finite
from penstock.models.folder import cannot_read, open_file, read_json
from penstock.models.packed_tensors import (
    PackedTensor,
    expanded,
    fold_packed,
    mask_of,
    shape_extents,
)
from penstock.weight_formats import PACKED_FILE, PACKED_SHAPE

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
}
"""The supported types of stored weights."""
_WHOLE = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_PIECE_BYTES = 8 << 20
_SAMPLE_BYTES = 4096
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file of the folder; `extent` has the dense shape if the tensor is `packed`."""

    file: str
    extent: Extent
    packed: PackedTensor | None = None


class WeightFiles:
    """The tensors of a folder by name. Files are opened on demand, one at a time.

    Args:
        folder: with `model.safetensors`, or shards and `model.safetensors.index.json`, or
            `model.packed.safetensors`.

    Raises:
        ConfigError: there are no safetensors; if there are pickles, the message explains the
            conversion.
        CorruptionError: the index or a header is invalid, or a shard is missing.
        StorageError: the operating system refuses to read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._sizes: dict[str, int] = {}
        self._open: tuple[str, BinaryIO] | None = None
        alone = next((file for file in (SINGLE, PACKED_FILE) if (folder / file).exists()), None)
        listed = self._listed() if alone is None else {}
        for file in dict.fromkeys(listed.values()) if alone is None else [alone]:
            self._add(file)
        for name, file in listed.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CorruptionError(
                    f"{folder / INDEX}: expected {name!r} in {file}, which has no such "
                    "tensor; download the folder again"
                )

    def _listed(self) -> dict[str, str]:
        """Return the file of each tensor according to the index."""
        path = self.folder / INDEX
        try:
            table = read_json(path, "the index of a sharded model", CorruptionError)
        except FileNotFoundError:
            raise _without_weights(self.folder) from None
        listed = table.get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise CorruptionError(f"{path}: it has no weight_map that names files")
        for name, file in listed.items():
            # A name that leaves the folder would let an index read any file.
            if not isinstance(file, str) or not _is_plain(file):
                raise CorruptionError(
                    f"{path}: the file of {name!r} is {file!r:.200}; expected the plain name of a "
                    ".safetensors file in the same folder"
                )
        return listed

    def _add(self, file: str) -> None:
        path = self.folder / file
        try:
            with open_file(path) as opened:
                size = os.fstat(opened.fileno()).st_size
                length = header_length(path, os.pread(opened.fileno(), 8, 0), size)
                head = os.pread(opened.fileno(), length, 0)
        except FileNotFoundError:
            raise CorruptionError(
                f"{path}: this file is missing; download the folder again"
            ) from None
        except OSError as error:
            raise cannot_read(path, error) from error
        self._sizes[file] = size
        extents = parse_header(path, head, size)
        if file == PACKED_FILE:
            self._add_packed(path, extents)
            return
        for name, extent in extents.items():
            if name in self.tensors:
                raise CorruptionError(
                    f"{self.folder}: {name!r} is both in {self.tensors[name].file} and in {file}; "
                    "keep one of them"
                )
            self.tensors[name] = StoredTensor(file, extent)

    def _add_packed(self, path: Path, extents: dict[str, Extent]) -> None:
        """Add the tensors of a packed file; the parts of a sparse weight are one tensor."""
        try:
            shapes = {
                name: tuple(torch.frombuffer(self._bytes(extent), dtype=torch.int64).tolist())
                for name, extent in shape_extents(path, extents).items()
            }
        finally:
            self.close()
        packed = fold_packed(path, extents, shapes)
        parts = {id(part) for one in packed.values() for part in (one.values, one.index)}
        for name, extent in extents.items():
            if id(extent) not in parts and name.removesuffix(PACKED_SHAPE) not in packed:
                self.tensors[name] = StoredTensor(PACKED_FILE, extent)
        for name, one in packed.items():
            place = Extent(one.values.dtype, one.shape, one.values.begin, one.values.end)
            self.tensors[name] = StoredTensor(PACKED_FILE, place, one)

    def _bytes(self, extent: Extent) -> bytearray:
        """Return a small tensor of the packed file."""
        data = bytearray(extent.end - extent.begin)
        self._read_into(PACKED_FILE, extent.begin, memoryview(data))
        return data

    def mask(self, name: str) -> "PackedIndex | None":
        """Return the mask of a packed tensor; None for other tensors.

        Raises:
            CorruptionError: the mask is not one of a weight of this shape.
            StorageError: the operating system refuses to read.
        """
        packed = self.tensors[name].packed
        if packed is None:
            return None
        return mask_of(self.folder / PACKED_FILE, name, packed, bytes(self._bytes(packed.index)))

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in its shape, converted to float32.

        Raises:
            ConfigError: a value is NaN or infinite as float32.
            CorruptionError: the file has changed since it was opened.
            StorageError: the operating system refuses to read.
        """
        stored, index = self.tensors[name], self.mask(name)
        count = math.prod(stored.extent.shape) if index is None else index.kept
        memory = allocate(4 * count)
        flat = torch.from_numpy(memory.view(np.float32))
        if stored.extent.dtype == "F32":
            self._read_into(stored.file, stored.extent.begin, memory.data)
        else:
            begin = 0
            for piece in self.pieces(name):
                flat[begin : begin + len(piece)] = piece
                begin += len(piece)
        if index is not None:
            flat = expanded(index, flat)
        refuse_non_finite(
            flat,
            f"{self.folder / stored.file}: {name!r}",
            "download the folder again, or take a checkpoint from before they appeared",
        )
        return flat.view(stored.extent.shape)

    def read_buffer(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that is no weight, in its shape; unlike weights it may be infinite.

        Raises:
            ConfigError: it cannot be converted to `dtype`: only floats are converted, to floats.
            CorruptionError: the file has changed since it was opened.
            StorageError: the operating system refuses to read.
        """
        stored = self.tensors[name]
        extent = stored.extent
        kind = FLOATS.get(extent.dtype) if dtype.is_floating_point else _WHOLE.get(extent.dtype)
        if kind is None or not (dtype.is_floating_point or kind is dtype):
            raise ConfigError(
                f"{self.folder / stored.file}: {name!r} is stored as {extent.dtype}, but is a "
                f"buffer of {str(dtype).removeprefix('torch.')} in the model; config.json and "
                "weights are of different models"
            )
        found = torch.empty(extent.shape, dtype=kind)
        data = found.reshape(-1).view(torch.uint8).numpy().data
        self._read_into(stored.file, extent.begin, data)
        return found.to(dtype)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield a weight's stored elements in their order; each piece is valid until the next."""
        dtype = FLOATS[self.tensors[name].extent.dtype]
        for part in self._byte_pieces(name):
            yield torch.frombuffer(part, dtype=dtype)

    def _byte_pieces(self, name: str) -> Iterator[memoryview]:
        stored = self.tensors[name]
        begin, end = stored.extent.begin, stored.extent.end
        buffer = memoryview(bytearray(min(_PIECE_BYTES, end - begin)))
        while begin < end:
            part = buffer[: min(_PIECE_BYTES, end - begin)]
            self._read_into(stored.file, begin, part)
            yield part
            begin += len(part)

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors of one type and shape have the same bytes."""
        return self._hash(one) == self._hash(other)

    def _hash(self, name: str) -> bytes:
        digest = xxhash.xxh3_128()
        packed = self.tensors[name].packed
        if packed is not None:
            digest.update(self._bytes(packed.index))
        for part in self._byte_pieces(name):
            digest.update(part)
        return digest.digest()

    def fingerprint(self) -> str:
        """Return a hash of names, types, shapes, and samples of every tensor.

        The hash distinguishes checkpoints, including fine-tunings of the same model, without
        reading all data: three samples of 4 KiB per tensor. The distribution of tensors over files
        does not affect it. It is no checksum.
        """
        digest = xxhash.xxh3_128()
        for name, stored in sorted(self.tensors.items()):
            extent = stored.extent
            digest.update(f"{name}\0{extent.dtype}\0{list(extent.shape)}\0".encode())
            for part in (extent,) if stored.packed is None else (extent, stored.packed.index):
                size = min(_SAMPLE_BYTES, part.end - part.begin)
                sample = memoryview(bytearray(size))
                last = part.end - size
                for place in (part.begin, (part.begin + last) // 2, last):
                    self._read_into(stored.file, place, sample)
                    digest.update(sample)
        self.close()
        return digest.hexdigest()

    def _read_into(self, file: str, offset: int, data: memoryview) -> None:
        path, filled = self.folder / file, 0
        descriptor = self._descriptor(file)
        while filled < len(data):
            try:
                count = os.preadv(descriptor, [data[filled:]], offset + filled)
            except OSError as error:
                raise cannot_read(path, error) from error
            if not count:
                raise CorruptionError(f"{path}: the file was shortened while it was read")
            filled += count

    def _descriptor(self, file: str) -> int:
        if self._open is not None and self._open[0] == file:
            return self._open[1].fileno()
        self.close()
        path = self.folder / file
        try:
            opened = open_file(path)
        except FileNotFoundError:
            raise CorruptionError(
                f"{path}: the file was deleted while the folder was in use"
            ) from None
        self._open = (file, opened)
        size = os.fstat(opened.fileno()).st_size
        if size != self._sizes[file]:
            raise CorruptionError(
                f"{path}: expected {self._sizes[file]:,} bytes, as at the opening, got {size:,}; "
                "do not change the folder while it is read"
            )
        return opened.fileno()

    def close(self) -> None:
        """Close the open file, if any; the next read opens it again."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _is_plain(file: str) -> bool:
    plain = os.path.basename(file) == file and "\\" not in file and file.isprintable()
    return plain and file.endswith(".safetensors") and not file.startswith(".")


def _without_weights(folder: Path) -> ConfigError:
    """Return the error for a folder without safetensors, with the next action."""
    names = sorted(path.name for path in folder.iterdir())
    pickles = [n for n in names if n.endswith(_PICKLES) and n != "training_args.bin"]
    if not pickles:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return ConfigError(
            f"{folder}: expected {SINGLE} or {INDEX}, it holds {shown or 'nothing'}; for a model "
            "without weights there is hf_config"
        )
    return ConfigError(
        f"{folder}: its weights are in {', '.join(pickles[:3])}"
        f"{' ...' if len(pickles) > 3 else ''}: pickles, which can run any code and are never read "
        f"here; convert them where you trust them:\n  {_conversion(folder, pickles)}"
    )


def _conversion(folder: Path, pickles: list[str]) -> str:
    """Return the shell command that converts pickled weights to safetensors."""
    here, target = json.dumps(str(folder)), json.dumps(str(folder / SINGLE))
    if len(pickles) == 1:
        code = (
            "import torch, safetensors.torch as s; "
            f"w = torch.load({json.dumps(str(folder / pickles[0]))}, "
            'map_location="cpu", weights_only=True); '
            f"s.save_file({{k: v.clone().contiguous() for k, v in w.items()}}, {target}, "
            '{"format": "pt"})'
        )
    else:
        code = (
            "import transformers as t; c = t.AutoConfig.from_pretrained("
            f"{here}); getattr(t, c.architectures[0]).from_pretrained({here}, "
            f'dtype="auto").save_pretrained({here})'
        )
    return f"python -c {shlex.quote(code)}"
