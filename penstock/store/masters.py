"""The weights themselves: float32 masters, whole or split, and the views of them that stream.

A weight that streams as bfloat16 lies as two halves of 16 bits: the high halves are the stream
values, so that nothing is cast or stored twice, and both together are the float32 master to the
bit (`penstock.kernels.split_master`). From outside a master is always float32.
"""

import numpy as np
import torch

from penstock.kernels.memory import page_lock
from penstock.kernels.split_master import Weight, join, split
from penstock.store.holding import Holding
from penstock.store.layout import allocate_role, slabs_of

PIECE_ELEMENTS = 4 << 20
"""Elements that are read, joined or converted at a time: what a pass over a model holds besides."""


class Masters:
    """Every weight of a program, in memory; zeros until they are written."""

    def __init__(self, program: Holding) -> None:
        specs = program.weights
        whole, halves = np.dtype(np.float32), np.dtype(np.uint16)
        is_split = {name: spec.stream_dtype == torch.bfloat16 for name, spec in specs.items()}
        split_names = {name: halves for name, chosen in is_split.items() if chosen}
        whole_names = {name: whole for name, chosen in is_split.items() if not chosen}
        masters, master_bytes = allocate_role(program, whole_names)
        high, high_bytes = allocate_role(program, split_names)
        low, low_bytes = allocate_role(program, split_names)
        roles = {"master": master_bytes, "high": high_bytes, "low": low_bytes}
        self.memory_bytes = {role: size for role, size in roles.items() if size}
        self._weights: dict[str, Weight] = {
            name: (high[name], low[name]) if is_split[name] else (masters[name],) for name in specs
        }
        self._streams = {
            name: _stream(self._weights[name], spec.shape) for name, spec in specs.items()
        }

    def weight(self, name: str) -> Weight:
        """Return the memory of a weight as the optimizer's kernels take it."""
        return self._weights[name]

    def stream(self, name: str) -> torch.Tensor:
        """Return the view of a weight that streams: float32 or bfloat16, in its shape."""
        return self._streams[name]

    def page_lock(self) -> bool:
        """Lock the pages that stream to a device; return whether the system allowed all of them."""
        return all(page_lock(slab) for slab in slabs_of(w[0] for w in self._weights.values()))

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """Return elements `begin` to `end` of a flattened weight, float32; maybe a view."""
        return join_piece(self._weights[name], begin, end)

    def write(self, name: str, begin: int, values: np.ndarray) -> None:
        """Overwrite the elements of a flattened weight from `begin` on with float32 `values`."""
        parts = self._weights[name]
        end = begin + values.size
        if len(parts) == 1:
            parts[0][begin:end] = values
        else:
            split(values, parts[0][begin:end], parts[1][begin:end])


def join_piece(parts: Weight, begin: int, end: int) -> np.ndarray:
    """Return elements `begin` to `end` of a weight's memory, float32; a view of a whole one."""
    if len(parts) == 1:
        return parts[0][begin:end]
    joined = np.empty(end - begin, np.float32)
    join(parts[0][begin:end], parts[1][begin:end], joined)
    return joined


def _stream(weight: Weight, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.from_numpy(weight[0])
    if len(weight) == 2:
        flat = flat.view(torch.bfloat16)
    return flat.view(shape)
