"""Bands of rows of a sparse matrix as dense tiles, and the kept entries of dense tiles.

Where the processor's dense product is faster than any sparse one, the matrix is expanded on its way
into that product. A tile is small enough for the cache.

Entries in the order of the store are expanded by a bitmap of the mask, 32 columns at a time, if the
processor has an instruction for it; else, and in another order, one by one.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange
from numba.core import types

from penstock.kernels.arguments import require_flat
from penstock.kernels.compilation import kernel
from penstock.kernels.sparse_vectors import float_of
from penstock.kernels.vector_code import processor_features
from penstock.kernels.vectors import call_llvm, element_pointer, intrinsic

_BLOCK = 16  # rows of a unit of work
_WORD = 32  # columns of a word of the bitmap
_I1, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (1, 16, 32, 64))


def has_expansion() -> bool:
    """Whether the processor expands 32 elements of 16 bits by a mask in one instruction."""
    return "+avx512vbmi2" in processor_features()


@intrinsic
def _expand_word(typing_context, values, first, tile, at, word):
    """Write 32 elements of a tile: by each bit of the word, the next value or 0.

    Returns the place of the first value after them. Values that no bit asks for are not read.
    """
    kinds = {"float32": (ir.FloatType(), "f32", 16), "uint16": (_I16, "i16", 32)}
    kind = kinds.get(str(values.dtype))
    if kind is None or tile.dtype != values.dtype:
        return None
    element, letters, lanes = kind
    vector, mask = ir.VectorType(element, lanes), ir.VectorType(_I1, lanes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, first, tile, at, word = arguments
        for part in range(_WORD // lanes):
            bits = builder.lshr(word, ir.Constant(_I32, part * lanes))
            bits = builder.trunc(bits, ir.IntType(lanes)) if lanes < _WORD else bits
            source = element_pointer(context, builder, signature.args[0], values, first)
            target = element_pointer(
                context, builder, signature.args[2], tile,
                builder.add(at, ir.Constant(_I64, part * lanes)),
            )  # fmt: skip
            inputs = [source, builder.bitcast(bits, mask), ir.Constant(vector, [0] * lanes)]
            name = f"llvm.masked.expandload.v{lanes}{letters}"
            expanded = call_llvm(builder, name, vector, inputs)
            builder.store(
                expanded,
                builder.bitcast(target, vector.as_pointer()),
                align=element.get_abi_size(context.target_data),
            )
            count = call_llvm(builder, f"llvm.ctpop.i{lanes}", bits.type, [bits])
            first = builder.add(first, builder.zext(count, _I64))
        return first

    return types.intp(values, types.intp, tile, types.intp, types.uint32), generate


@kernel
def _mark(row_starts, columns, words, bitmap):
    rows = row_starts.size - 1
    for block in prange((rows + _BLOCK - 1) // _BLOCK):
        for row in range(block * _BLOCK, min((block + 1) * _BLOCK, rows)):
            for n in range(row_starts[row], row_starts[row + 1]):
                word = row * words + columns[n] // _WORD
                bitmap[word] |= np.uint32(1) << np.uint32(columns[n] % _WORD)


@kernel
def _expand_marked(row_starts, columns, bitmap, values, first, last, width, tile):
    words = width // _WORD  # the rest of a row's columns goes one by one
    stride = (width + _WORD - 1) // _WORD
    for block in prange((last - first + _BLOCK - 1) // _BLOCK):
        low = first + block * _BLOCK
        high = min(low + _BLOCK, last)
        for row in range(low, high):
            at = (row - first) * width
            n = row_starts[row]
            for word in range(words):
                n = _expand_word(values, n, tile, at + _WORD * word, bitmap[row * stride + word])
            tile[at + words * _WORD : at + width] = 0
            for k in range(n, row_starts[row + 1]):
                tile[at + columns[k]] = values[k]


@kernel
def _expand(row_starts, columns, values, positions, first, last, width, tile):
    for block in prange((last - first + _BLOCK - 1) // _BLOCK):
        low = first + block * _BLOCK
        high = min(low + _BLOCK, last)
        for row in range(low, high):
            at = (row - first) * width
            tile[at : at + width] = 0
            for n in range(row_starts[row], row_starts[row + 1]):
                place = positions[n] if positions.size > 0 else n
                tile[at + columns[n]] = values[place]


@kernel
def _collect(row_starts, columns, first, last, width, tile, kept):
    for block in prange((last - first + _BLOCK - 1) // _BLOCK):
        low = first + block * _BLOCK
        high = min(low + _BLOCK, last)
        for row in range(low, high):
            at = (row - first) * width
            for n in range(row_starts[row], row_starts[row + 1]):
                kept[n] = float_of(tile[at + columns[n]])


def bitmap_of(row_starts: np.ndarray, columns: np.ndarray, width: int) -> np.ndarray:
    """Return the bitmap of a mask, uint32 `[rows * ceil(width / 32)]`, the lowest bit first.

    Args:
        row_starts: int64 `[rows + 1]`.
        columns: int32 `[entries]`.
        width: columns of the matrix.
    """
    words = -(-width // _WORD)
    bitmap = np.zeros((row_starts.size - 1) * words, np.uint32)
    _mark(row_starts, columns, words, bitmap)
    return bitmap


def expand_marked(
    row_starts: np.ndarray,
    columns: np.ndarray,
    bitmap: np.ndarray,
    values: np.ndarray,
    width: int,
    band: range,
    tile: np.ndarray,
) -> None:
    """Write the rows `band` of a matrix as a dense tile, by what `bitmap_of` returned.

    Other arguments and errors are those of `expand`; entries are in their own order.
    """
    _require_rows(row_starts, columns, width, band)
    require_flat("values", values, columns.size, np.float32, np.uint16)
    require_flat("bitmap", bitmap, (row_starts.size - 1) * -(-width // _WORD), np.uint32)
    require_flat("tile", tile, len(band) * width, values.dtype.type, write=True)
    _expand_marked(row_starts, columns, bitmap, values, band.start, band.stop, width, tile)


def expand(
    row_starts: np.ndarray,
    columns: np.ndarray,
    values: np.ndarray,
    positions: np.ndarray,
    width: int,
    band: range,
    tile: np.ndarray,
) -> None:
    """Write the rows `band` of a matrix as a dense tile.

    Args:
        row_starts: int64 `[rows + 1]`.
        columns: int32 `[entries]`, less than `width`.
        values: float32, or uint16 for bfloat16 patterns, `[entries]`.
        positions: int32 `[entries]`, where each entry's value is; empty: in the entries' own order.
        width: columns of the matrix.
        band: consecutive rows.
        tile: of the values' type, `[rows of the band * width]`.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    _require_rows(row_starts, columns, width, band)
    require_flat("values", values, columns.size, np.float32, np.uint16)
    if positions.size:
        require_flat("positions", positions, columns.size, np.int32)
    require_flat("tile", tile, len(band) * width, values.dtype.type, write=True)
    _expand(row_starts, columns, values, positions, band.start, band.stop, width, tile)


def collect(
    row_starts: np.ndarray,
    columns: np.ndarray,
    width: int,
    band: range,
    tile: np.ndarray,
    kept: np.ndarray,
) -> None:
    """Write what a dense tile has at the entries of the rows `band`: float32 `kept` `[entries]`.

    Other arguments and errors are those of `expand`. Entries of other rows are not touched.
    """
    _require_rows(row_starts, columns, width, band)
    require_flat("tile", tile, len(band) * width, np.float32, np.uint16)
    require_flat("kept", kept, columns.size, np.float32, write=True)
    _collect(row_starts, columns, band.start, band.stop, width, tile, kept)


def _require_rows(row_starts: np.ndarray, columns: np.ndarray, width: int, band: range) -> None:
    require_flat("row_starts", row_starts, row_starts.size, np.int64)
    require_flat("columns", columns, columns.size, np.int32)
    rows = row_starts.size - 1
    if band.step != 1 or not 0 <= band.start < band.stop <= rows:
        raise ValueError(f"band: expected consecutive rows of 0 to {rows}, got {band}")
    if width < 1:
        raise ValueError(f"width: expected at least one column, got {width}")
