"""Formats of weights: the arrays of a weight in the store, and which of them is streamed.

A program names a format for each of its weights. The store derives memory layout, files and wire
sizes from the format. If a weight is streamed in another type than a stage computes in, the
compiler adds the conversion. `store/codecs.py` converts between values and arrays.
"""

from dataclasses import dataclass, replace

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
        name: used in digests and in descriptions of files.
        stream: the part that is sent to engines, as `stream_dtype`.
        rest: the parts that stay in the store.
        saved_dtype: the type in which a checkpoint holds the weight, exactly.
        is_trainable: whether an optimizer can update the weight.
        is_sparse: whether the parts hold only the entries that a mask keeps; the mask is stored and
            streamed as a packed index (`penstock.sparsity`).
    """

    name: str
    stream: FormatPart
    rest: tuple[FormatPart, ...]
    stream_dtype: torch.dtype
    saved_dtype: torch.dtype
    is_trainable: bool
    is_sparse: bool = False

    @property
    def parts(self) -> tuple[FormatPart, ...]:
        """All arrays of a weight; the streamed one comes first."""
        return (self.stream, *self.rest)

    @property
    def rest_width(self) -> int:
        """Bytes per element of the parts that are not streamed."""
        return sum(part.width for part in self.rest)

    @property
    def width(self) -> int:
        """Bytes per element in the store."""
        return self.stream.width + self.rest_width

    @property
    def saved_numpy(self) -> str:
        """The type of the arrays in which a checkpoint's values are exchanged."""
        return "uint16" if self.saved_dtype == torch.bfloat16 else "float32"


DENSE = WeightFormat(
    "dense", FormatPart("master", "float32"), (), torch.float32, torch.float32, True
)
"""The float32 master, streamed unchanged."""

SPLIT = WeightFormat(
    "split",
    FormatPart("high", "uint16"),
    (FormatPart("low", "uint16"),),
    torch.bfloat16,
    torch.float32,
    True,
)
"""The float32 master in two halves; the high half is streamed as bfloat16
(`kernels/split_master.py`)."""

BFLOAT16 = WeightFormat(
    "bfloat16", FormatPart("bfloat16", "uint16"), (), torch.bfloat16, torch.bfloat16, False
)
"""A frozen weight whose values are exactly bfloat16: 2 bytes per element, and no master."""

PACKED = replace(DENSE, name="packed", is_sparse=True)
"""The float32 masters of the kept entries, in the order of the mask, streamed unchanged."""

PACKED_SPLIT = replace(SPLIT, name="packed split", is_sparse=True)
"""The float32 masters of the kept entries in two halves; the high half is streamed as bfloat16."""

FORMATS = {one.name: one for one in (DENSE, SPLIT, BFLOAT16, PACKED, PACKED_SPLIT)}


def format_of(
    stream_dtype: torch.dtype, is_exactly_bfloat16: bool = False, is_sparse: bool = False
) -> WeightFormat:
    """Return the format of a weight that is computed in `stream_dtype`.

    **Arguments:** `is_exactly_bfloat16` says that the weight is frozen and all its values are
    exactly bfloat16. `is_sparse` says that only the entries of a mask exist.
    """
    if is_sparse:
        return PACKED_SPLIT if stream_dtype == torch.bfloat16 else PACKED
    if is_exactly_bfloat16:
        return BFLOAT16
    return SPLIT if stream_dtype == torch.bfloat16 else DENSE


PACKED_FILE = "model.packed.safetensors"
"""The file of `penstock export --packed`; a name that other programs do not look for."""

PACKED_VALUES, PACKED_INDEX, PACKED_SHAPE = ".packed_values", ".packed_index", ".packed_shape"
"""The tensors of a sparse weight in that file, each after the weight's name."""
