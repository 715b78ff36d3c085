"""The weights in memory, each in its format (`penstock.weight_formats`), and their streamed views.

The streamed part of a weight is a view of stored memory, so nothing is cast or stored twice. The
interface for values is always float32. Of a sparse weight, elements are the entries that its mask
keeps.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.kernels.memory import page_lock
from penstock.kernels.split_master import Weight
from penstock.program import WeightSpec
from penstock.store.codecs import decode, encode
from penstock.store.holding import Holding
from penstock.store.layout import allocate_role, slabs_of
from penstock.store.packed import with_room
from penstock.weight_formats import BFLOAT16, DENSE, FORMATS, PACKED, PACKED_SPLIT, SPLIT

if TYPE_CHECKING:
    from penstock.sparsity import Remap

_FLOATS = (DENSE, BFLOAT16, PACKED)
_FORMATS = {"fp32": _FLOATS, "bf16": (SPLIT, PACKED_SPLIT, *_FLOATS)}

PIECE_ELEMENTS = 4 << 20
"""Elements that are read, joined or converted at once: the extra memory of a pass over a model."""


class Masters:
    """Every weight of a program, in memory; zeros until the first write."""

    def __init__(self, program: Holding) -> None:
        self._specs = program.weights
        arrays: dict[str, dict[str, np.ndarray]] = {}
        self.memory_bytes: dict[str, int] = {}
        for part in dict.fromkeys(part for one in FORMATS.values() for part in one.parts):
            kinds = {
                name: np.dtype(part.dtype)
                for name, spec in self._specs.items()
                if part in spec.format.parts
            }
            arrays[part.name], size = allocate_role(program, kinds)
            if size:
                self.memory_bytes[part.name] = size
        self._room: dict[str, Weight] = {
            name: tuple(arrays[part.name][name] for part in spec.format.parts)
            for name, spec in self._specs.items()
        }
        self._weights = dict(self._room)
        self._streams = {
            name: stream_of(self._weights[name][0], spec) for name, spec in self._specs.items()
        }

    def weight(self, name: str) -> Weight:
        """Return the memory of a weight in the form that the optimizer's kernels take."""
        return self._weights[name]

    def stream(self, name: str) -> torch.Tensor:
        """Return the streamed view of a weight, in its shape; flat if the weight is sparse."""
        return self._streams[name]

    def keep(self, name: str, kept: int) -> None:
        """Set the number of entries of a sparse weight."""
        self._require_room(name, kept)
        self._weights[name] = tuple(part[:kept] for part in self._room[name])
        self._streams[name] = stream_of(self._weights[name][0], self._specs[name])

    def move(self, name: str, remap: "Remap") -> None:
        """Move the entries of a sparse weight to their places after a change of its mask."""
        self._require_room(name, remap.index.kept)
        for part, room in zip(self._weights[name], self._room[name], strict=True):
            room[: remap.index.kept] = remap.move(part)
        self.keep(name, remap.index.kept)

    def _require_room(self, name: str, kept: int) -> None:
        """Make room for so many entries of a sparse weight."""
        parts = self._specs[name].format.parts
        larger = []
        for part, room in zip(parts, self._room[name], strict=True):
            larger.append(with_room(room, kept))
            if larger[-1] is not room:
                self.memory_bytes[part.name] += larger[-1].nbytes
        self._room[name] = tuple(larger)

    def page_lock(self) -> bool:
        """Page-lock the streamed memory; return whether the system allowed all of it."""
        return all(page_lock(slab) for slab in slabs_of(w[0] for w in self._room.values()))

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """Return elements `begin` to `end` of a flattened weight, float32; maybe a view."""
        return decode(self._specs[name].format, self._weights[name], begin, end)

    def read_room(self, name: str, begin: int, end: int) -> np.ndarray:
        """Like `read`, of values that were written and do not have their mask yet."""
        return decode(self._specs[name].format, self._room[name], begin, end)

    def write(self, name: str, begin: int, values: np.ndarray) -> None:
        """Overwrite the elements of a flattened weight from `begin` on with float32 `values`.

        Raises:
            ConfigError: its format cannot hold them exactly.
        """
        here = slice(begin, begin + values.size)
        if self._specs[name].is_sparse:
            self._require_room(name, here.stop)
        encode(self._specs[name].format, name, values, [part[here] for part in self._room[name]])


def check_precision(program: Holding, precision: str) -> None:
    """Check that a store of a precision can hold the formats of all weights.

    **Raises:** `ValueError` if it cannot.
    """
    if precision not in _FORMATS:
        raise ValueError(f"precision must be 'fp32' or 'bf16', not {precision!r}")
    for name, spec in program.weights.items():
        if spec.format not in _FORMATS[precision]:
            raise ValueError(f"{name} streams as {spec.stream_dtype}, the precision is {precision}")


def stream_of(part: np.ndarray, spec: WeightSpec) -> torch.Tensor:
    """Return the streamed values of a weight, in its shape, as a view of that part's memory; flat
    if the weight is sparse."""
    values = torch.from_numpy(part).view(spec.stream_dtype)
    return values if spec.is_sparse else values.view(spec.shape)
