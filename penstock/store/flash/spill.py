"""Gradients that do not fit in memory: on flash from the backward sweep until their update.

Their file has no name, so it disappears with the process, however the process ends. Gradients are
needed only until their step is decided and its updates are applied. Blocks of a sparse weight begin
and end within pages, so whole pages are read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.errors import CorruptionError
from penstock.kernels.memory import allocate
from penstock.store import files
from penstock.store.flash.division import SLABS
from penstock.store.flash.layout import Block, Unit
from penstock.store.flash.medium import ALIGNMENT_BYTES, ExtentFile
from penstock.store.flash.version import checksum


class GradientSpill:
    """Space on flash per unit, and the slabs through which gradients are written.

    `half` says whether gradients are bfloat16 patterns or float32.
    """

    def __init__(self, folder: Path, units: Sequence[Unit], half: bool, slab_bytes: int) -> None:
        self._type = np.dtype(np.uint16 if half else np.float32)
        self._offsets: dict[int, int] = {}
        end, planned = 0, list[tuple[int, int]]()
        for unit in units:
            self._offsets[unit.index] = end
            planned.append((end, unit.expected.elements * self._type.itemsize))
            end += unit.elements * self._type.itemsize
        self.bytes = sum(size for _, size in planned)
        self.path = folder / "gradients"
        self._checks: dict[int, list[bytes]] = {}
        self.slabs = [allocate(slab_bytes) for _ in range(SLABS)]
        with files.storage_errors(folder, self.bytes):
            self.path.unlink(missing_ok=True)
            files.require_space(self.path, self.bytes)
            ranges = None if self.bytes == end else planned
            self._file = ExtentFile(self.path, end, create=True, planned=ranges)
            self.path.unlink()

    def __contains__(self, unit: Unit) -> bool:
        return unit.index in self._offsets

    def arrays(self, unit: Unit, slab: np.ndarray) -> Mapping[str, np.ndarray]:
        """Return the parts of a slab for the gradients of a unit's weights."""
        whole = slab[: unit.elements * self._type.itemsize].view(self._type)
        if unit.is_sparse:
            return {unit.names[0]: whole[: unit.capacity]}
        return {
            name: whole[begin : begin + size]
            for name, begin, size in zip(unit.names, unit.begins, unit.sizes, strict=True)
        }

    def parts(
        self, unit: Unit, block: Block, buffer: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the parts of a buffer: a block's state, and what `fetch` reads if the gradient is
        on flash."""
        end = block.state_bytes
        if unit not in self:
            return buffer[:end], None
        return buffer[:end], buffer[end : end + self.block_bytes(unit, block)]

    def block_bytes(self, unit: Unit, block: Block) -> int:
        """Return the bytes that `fetch` reads for a block."""
        first, last = self._pages(unit, block)
        return last - first

    def _pages(self, unit: Unit, block: Block) -> tuple[int, int]:
        """Return the bytes of a unit's gradient that hold a block's, in whole pages."""
        first, last = block.begin * self._type.itemsize, block.end * self._type.itemsize
        if not unit.is_sparse:
            return first, last
        return first - first % ALIGNMENT_BYTES, last + -last % ALIGNMENT_BYTES

    def write(self, unit: Unit, blocks: Sequence[Block], slab: np.ndarray) -> int:
        """Write a unit's gradient from a slab; return the number of bytes."""
        width = self._type.itemsize
        size = self._pages(unit, blocks[-1])[1] if unit.is_sparse else unit.elements * width
        data = slab[:size]
        checks = [checksum(data[block.begin * width : block.end * width]) for block in blocks]
        with files.storage_errors(self.path.parent, data.nbytes):
            self._file.write(self._offsets[unit.index], data)
        self._checks[unit.index] = checks
        return data.nbytes

    def fetch(self, unit: Unit, block: Block, into: np.ndarray) -> None:
        """Read a block's gradient into its part of a buffer; the caller must verify it."""
        self._file.read(self._offsets[unit.index] + self._pages(unit, block)[0], into)

    def checked(self, unit: Unit, block: Block, data: np.ndarray) -> np.ndarray:
        """Return the data that `fetch` read, in the form that kernels take.

        Raises:
            CorruptionError: its bytes have changed; the message gives the place and both checksums.
        """
        begin = block.begin * self._type.itemsize - self._pages(unit, block)[0]
        data = data[begin : begin + block.elements * self._type.itemsize]
        expected, found = self._checks[unit.index][block.number], checksum(data)
        if found != expected:
            offset = self._offset(unit, block)
            raise CorruptionError(
                f"{self.path}: damaged in bytes {offset:,} to {offset + data.nbytes:,}, which hold "
                f"gradients of {unit.names[0]}: expected checksum {expected.hex()}, got "
                f"{found.hex()}; open the run again: it continues from the last durable step"
            )
        return data.view(self._type)

    def _offset(self, unit: Unit, block: Block) -> int:
        return self._offsets[unit.index] + block.begin * self._type.itemsize

    def close(self) -> None:
        """Close the file and free its disk space."""
        self._file.close()
