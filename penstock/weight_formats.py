"""Formats of weights: which arrays make up a weight in the store, and which of them streams.

A program names a format for each of its weights; the store lays out its memory, its files and its
wire sizes by it; the compiler opens in a stage what does not stream in the type that the stage
computes in. How values become arrays and arrays values is in `store/codecs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NUMPY_BYTES = {"float32": 4, "uint16": 2}


@dataclass(frozen=True)
class FormatPart:
    """One array of a weight in the store: one value of this NumPy type per element."""

    name: str
    dtype: str

    @property
    def width(self) -> int:
        """Bytes per element."""
        return _NUMPY_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightFormat:
    """How the store keeps a weight.

    Attributes:
        name: in digests and in descriptions of files.
        stream: the part that travels to engines, as `stream_dtype`.
        rest: the parts that stay in the store.
        saved_dtype: the type in which a checkpoint holds the weight, exactly.
        is_trainable: whether an optimizer can update it.
    """

    name: str
    stream: FormatPart
    rest: tuple[FormatPart, ...]
    stream_dtype: torch.dtype
    saved_dtype: torch.dtype
    is_trainable: bool

    @property
    def parts(self) -> tuple[FormatPart, ...]:
        """All arrays of a weight; the one that streams comes first."""
        return (self.stream, *self.rest)

    @property
    def rest_width(self) -> int:
        """Bytes per element of what does not stream."""
        return sum(part.width for part in self.rest)

    @property
    def width(self) -> int:
        """Bytes per element in the store."""
        return self.stream.width + self.rest_width

    @property
    def saved_numpy(self) -> str:
        """The type of the arrays that a checkpoint's values come and go in."""
        return "uint16" if self.saved_dtype == torch.bfloat16 else "float32"


DENSE = WeightFormat(
    "dense", FormatPart("master", "float32"), (), torch.float32, torch.float32, True
)
"""The float32 master, which streams as it is."""

SPLIT = WeightFormat(
    "split",
    FormatPart("high", "uint16"),
    (FormatPart("low", "uint16"),),
    torch.bfloat16,
    torch.float32,
    True,
)
"""The float32 master in two halves, of which the high one streams as bfloat16
(`kernels/split_master.py`)."""

BFLOAT16 = WeightFormat(
    "bfloat16", FormatPart("bfloat16", "uint16"), (), torch.bfloat16, torch.bfloat16, False
)
"""A frozen weight whose values are exactly bfloat16: 2 bytes per element, and no master."""

FORMATS = {one.name: one for one in (DENSE, SPLIT, BFLOAT16)}


def format_of(stream_dtype: torch.dtype, is_exactly_bfloat16: bool = False) -> WeightFormat:
    """Return the format of a weight that is computed with in `stream_dtype`.

    **Arguments:** `is_exactly_bfloat16` says that the weight is frozen and each of its values a
    bfloat16.
    """
    if is_exactly_bfloat16:
        return BFLOAT16
    return SPLIT if stream_dtype == torch.bfloat16 else DENSE
