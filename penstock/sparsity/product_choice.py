"""How the products of a sparse weight are computed: plain data, recorded with a run.

Which algorithm is faster depends on processor, shape, type, sparsity and tokens, and the results of
two algorithms differ in the last bits. A resumed run uses the recorded choice and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch

from penstock.errors import ConfigError

Bfloat16 = Literal["dots", "unpacked"]

PANEL_TOKENS = {torch.float32: (32, 64, 128), torch.bfloat16: (64, 128, 256)}
"""Tokens of a panel that a measurement tries, by type."""

TILE_BYTES = (1 << 20, 4 << 20, 16 << 20)
"""Bytes of a dense tile that a measurement tries."""

LEAST_TILE_ROWS = 16
LEAST_BLOCK_COLUMNS = 16
_MOST_BLOCK_COLUMNS = 1 << 16  # columns of a block are counted in 16 bits
_MOST_PANEL_TOKENS = 1024
_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class SparseKernel:
    """A product of the entries of the mask alone, by a sparse kernel.

    Attributes:
        block_columns: columns whose inputs pass by together; they should stay in the first-level
            cache or, where rows have few entries, in the second. From 1 to 65536.
        band_rows: rows of a unit of work; None: all. Fewer keep more threads busy when there are
            few tokens.
        panel_tokens: tokens of a panel, a multiple of 16; of 32 for bfloat16.
        bfloat16: how bfloat16 is multiplied, by the processor's dot product of pairs or as float32.
    """

    block_columns: int
    band_rows: int | None = None
    panel_tokens: int = 64
    bfloat16: Bfloat16 = "unpacked"


@dataclass(frozen=True)
class DenseTiles:
    """A dense product of bands of rows that are expanded on their way into it.

    Attributes:
        band_rows: rows that are expanded at once; columns of the weight for the gradient of the
            inputs, unless one band holds them all.
    """

    band_rows: int


Product = SparseKernel | DenseTiles
_ALGORITHMS: dict[str, type[SparseKernel] | type[DenseTiles]] = {
    "sparse": SparseKernel,
    "dense tiles": DenseTiles,
}
PRODUCTS = ("forward", "input_gradient", "weight_gradient")
"""The products of a choice: its fields."""


@dataclass(frozen=True)
class Choice:
    """How the three products of a sparse weight are computed.

    `forward` and `weight_gradient` go through the rows of the weight, `input_gradient` its columns.
    """

    forward: Product
    input_gradient: Product
    weight_gradient: Product

    def as_record(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        names = {kind: name for name, kind in _ALGORITHMS.items()}
        record: dict[str, Any] = {}
        for name in PRODUCTS:
            product = getattr(self, name)
            record[name] = {"way": names[type(product)], **asdict(product)}
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Choice:
        """Return the choice that `as_record` returned as plain data.

        Raises:
            ConfigError: the record is not one of a choice.
        """
        try:
            _require_names(record, PRODUCTS)
            choice = cls(**{name: _product(dict(record[name])) for name in PRODUCTS})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"sparse products: expected the record of a choice ({', '.join(PRODUCTS)}), "
                f"got {record!r}: {error!r}; "
                "resume the run with the version of Penstock that recorded it"
            ) from error
        return choice


def panel_sizes(dtype: torch.dtype, tokens: int) -> tuple[int, ...]:
    """Return the sizes of a panel that suit a number of tokens, ascending."""
    sizes = PANEL_TOKENS[dtype]
    return tuple(size for size in sizes if size <= max(tokens, sizes[0]))


def _product(record: dict[str, Any]) -> Product:
    """Return a product of its record, which names every field: a default could change bits."""
    kind = _ALGORITHMS[record.pop("way")]
    _require_names(record, [field.name for field in fields(kind)])
    for name, value in record.items():
        if name == "bfloat16":
            is_known = value in get_args(Bfloat16)
        elif name == "band_rows" and kind is SparseKernel:
            is_known = value is None or _is_count(value)
        elif name == "panel_tokens":
            is_known = _is_count(value) and value % 16 == 0 and value <= _MOST_PANEL_TOKENS
        elif name == "block_columns":
            is_known = _is_count(value) and value <= _MOST_BLOCK_COLUMNS
        else:
            is_known = _is_count(value)
        if not is_known:
            raise ValueError(f"{name}: {value!r}")
    return kind(**record)


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MOST_ROWS  # a bool is none


def _require_names(record: Mapping[str, Any], names: Sequence[str]) -> None:
    if set(record) != set(names):
        raise ValueError(f"expected {', '.join(names)}, got {', '.join(map(str, record))}")
