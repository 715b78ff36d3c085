"""The mask of a sparse weight, and the orders in which the products go through it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.kernels import sparse_layout
from penstock.kernels.arguments import require_flat
from penstock.kernels.sparse_expansion import bitmap_of
from penstock.kernels.sparse_products import BlockedCsr

_NO_POSITIONS = np.empty(0, np.int32)


@dataclass(frozen=True)
class Rows:
    """A sparse matrix row after row.

    Attributes:
        shape: rows and columns.
        starts: int64 `[rows + 1]`.
        columns: int32 `[entries]`, ascending within a row.
        positions: int32 `[entries]`, where each entry's value is; empty: in this order.
    """

    shape: tuple[int, int]
    starts: np.ndarray
    columns: np.ndarray
    positions: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.starts.nbytes + self.columns.nbytes + self.positions.nbytes

    def transposed(self) -> Rows:
        """Return the transposed matrix."""
        rows, columns = self.shape
        starts = np.zeros(columns + 1, np.int64)
        indices, positions = (np.empty(self.columns.size, np.int32) for _ in range(2))
        sparse_layout.transpose(self.starts, self.columns, starts, indices, positions)
        return Rows((columns, rows), starts, indices, positions)

    def blocked(self, block_columns: int, band_rows: int) -> BlockedCsr:
        """Return the entries in the order of a product with these blocks and bands."""
        rows, columns = self.shape
        blocks = max(1, -(-columns // block_columns))
        bands = -(-rows // band_rows)
        places = np.zeros(blocks * rows, np.int32)
        sparse_layout.count_segments(self.starts, self.columns, block_columns, places)
        most = min(blocks * rows, self.columns.size + 2 * rows)
        cells = np.empty(bands * blocks + 1, np.int64)
        segment_rows, starts = np.empty(most, np.int32), np.empty(most + 1, np.int32)
        histogram = np.empty(block_columns + 2, np.int32)
        count = sparse_layout.order_segments(
            places, rows, band_rows, histogram, cells, segment_rows, starts
        )
        local = np.empty(self.columns.size, np.uint16)
        positions = np.empty(self.columns.size, np.int32)
        sparse_layout.place_entries(
            self.starts, self.columns, self.positions, block_columns, places, local, positions
        )
        return BlockedCsr(
            self.shape,
            block_columns,
            band_rows,
            cells,
            segment_rows[:count].copy(),
            starts[: count + 1].copy(),
            local,
            positions,
        )


class SparseLayout:
    """The mask of a weight `[outputs, inputs]`, made once per change of the mask.

    What a product needs is made at its first use and kept: the order of a matrix or, for a product
    that goes through columns entry by entry, the transposed mask. Several threads may use a layout
    at once.

    Attributes:
        rows: the mask row after row, in the order of the store.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._blocked: dict[tuple[bool, int, int], BlockedCsr] = {}
        self._lock = threading.RLock()

    @classmethod
    def of(
        cls, row_starts: np.ndarray, columns: np.ndarray, shape: tuple[int, int]
    ) -> SparseLayout:
        """Return the layout of a mask.

        Args:
            row_starts: int64 `[outputs + 1]`, the first entry of each row, and the end.
            columns: int32 `[entries]`, ascending within a row.
            shape: outputs and inputs, at least 1 each.

        Raises:
            ValueError: the arrays do not describe a mask of this shape.
        """
        outputs, inputs = shape
        if outputs < 1 or inputs < 1:
            raise ValueError(f"shape: expected at least one row and one column, got {list(shape)}")
        require_flat("row_starts", row_starts, outputs + 1, np.int64)
        require_flat("columns", columns, columns.size, np.int32)
        if columns.size >= 2**31:
            raise ValueError(
                f"columns: expected fewer than 2^31 entries, got {columns.size}; divide the weight"
            )
        if row_starts[0] != 0 or row_starts[-1] != columns.size or (np.diff(row_starts) < 0).any():
            raise ValueError(
                f"row_starts: expected ascending numbers from 0 to {columns.size}, the number of "
                f"entries, got {row_starts[0]} to {row_starts[-1]}"
            )
        fault = int(sparse_layout.first_fault(row_starts, columns, inputs))
        if fault >= 0:
            raise ValueError(
                f"columns: expected ascending numbers from 0 to {inputs - 1} in every row, got "
                f"{columns[row_starts[fault] : row_starts[fault + 1]].tolist()} in row {fault}"
            )
        return cls(Rows((outputs, inputs), row_starts, columns, _NO_POSITIONS))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of the weight."""
        return self.rows.shape

    @property
    def entries(self) -> int:
        """The number of entries that the mask keeps."""
        return int(self.rows.columns.size)

    @cached_property
    def transposed_rows(self) -> Rows:
        """The mask column after column, with the positions of its entries in the store."""
        with self._lock:
            return self.rows.transposed()

    @cached_property
    def bitmap(self) -> np.ndarray:
        """The mask by rows, one bit per element of the weight."""
        with self._lock:
            return bitmap_of(self.rows.starts, self.rows.columns, self.shape[1])

    def blocked(
        self, block_columns: int, band_rows: int | None, *, transposed: bool = False
    ) -> BlockedCsr:
        """Return the entries in the order of a product.

        Args:
            block_columns: inputs of a block; of the transposed mask with `transposed`.
            band_rows: outputs of a band; None: all.

        Raises:
            ValueError: no block can have so many columns.
        """
        if not 1 <= block_columns <= sparse_layout.MOST_BLOCK_COLUMNS:
            raise ValueError(
                f"block_columns: expected 1 to {sparse_layout.MOST_BLOCK_COLUMNS}, "
                f"got {block_columns}"
            )
        if band_rows is not None and band_rows < 1:
            raise ValueError(f"band_rows: expected at least 1, or None for all, got {band_rows}")
        outputs = self.shape[1] if transposed else self.shape[0]
        band_rows = outputs if band_rows is None else min(band_rows, outputs)
        key = (transposed, block_columns, band_rows)
        with self._lock:
            if key not in self._blocked:
                rows = self._transposed_now() if transposed else self.rows
                self._blocked[key] = rows.blocked(block_columns, band_rows)
            return self._blocked[key]

    def _transposed_now(self) -> Rows:
        """The transposed mask, which is not kept for an order that is made of it."""
        kept: Rows | None = self.__dict__.get("transposed_rows")
        return kept or self.rows.transposed()

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept at present."""
        with self._lock:
            matrices = [part for matrix in self._blocked.values() for part in matrix[3:]]
            kept = [self.__dict__.get(name) for name in ("transposed_rows", "bitmap")]
        held = sum(array.nbytes for array in matrices)
        return self.rows.nbytes + held + sum(part.nbytes for part in kept if part is not None)

    def forget_blocked(self) -> None:
        """Free the orders that products have asked for; they are made again when needed."""
        with self._lock:
            self._blocked.clear()
