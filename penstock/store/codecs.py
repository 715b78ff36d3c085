"""Conversion between a weight's values and the arrays of its format; exact for every bit pattern.

Outside the store, the values of a weight are always float32. A bfloat16 is the high half of a
float32 whose low half is zero. A format that stores only high halves therefore accepts no other
values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError
from penstock.kernels.split_master import Weight, join, split
from penstock.weight_formats import (
    BFLOAT16,
    DENSE,
    PACKED,
    PACKED_SPLIT,
    SPLIT,
    WeightFormat,
)

_LOW, _HIGH = 0, 1  # the halves of a float32 in memory order, the low half first


def encode(
    weight_format: WeightFormat, name: str, values: np.ndarray, parts: Sequence[np.ndarray]
) -> None:
    """Write float32 `values` `[n]` of the weight `name` into the arrays of its format, each `[n]`.

    Raises:
        ConfigError: the format cannot hold these values exactly.
    """
    encode_saved(weight_format, saved_values(weight_format, name, values), parts)


def encode_saved(
    weight_format: WeightFormat, saved: np.ndarray, parts: Sequence[np.ndarray]
) -> None:
    """Write values of a weight, in the type of a checkpoint, into the arrays of its format."""
    _CODECS[weight_format.name].encode(saved, parts)


def decode(weight_format: WeightFormat, parts: Weight, begin: int, end: int) -> np.ndarray:
    """Return elements `begin` to `end` of a weight as float32; a view if the format is dense."""
    return _CODECS[weight_format.name].decode(parts, begin, end)


def saved_values(weight_format: WeightFormat, name: str, values: np.ndarray) -> np.ndarray:
    """Return float32 values of the weight `name` in the type that a checkpoint uses for this
    format.

    The type is float32, or bfloat16 patterns as uint16.

    Raises:
        ConfigError: a value cannot be represented as bfloat16.
    """
    if weight_format.saved_numpy == "float32":
        return values
    halves = np.ascontiguousarray(values, np.float32).view(np.uint16).reshape(-1, 2)
    if halves[:, _LOW].any():
        first = int(np.flatnonzero(halves[:, _LOW])[0])
        raise ConfigError(
            f"weight {name} is stored as bfloat16, but its element {first} is "
            f"{values.reshape(-1)[first]!r}, which bfloat16 cannot represent exactly; use the "
            "weights that the run was started with, or start another run with these weights"
        )
    return np.ascontiguousarray(halves[:, _HIGH])


def values_of_saved(saved: np.ndarray) -> np.ndarray:
    """Return a checkpoint's values of a weight as float32."""
    return widened(saved) if saved.dtype == np.uint16 else saved


def widened(patterns: np.ndarray) -> np.ndarray:
    """Return bfloat16 patterns, uint16, as float32 values."""
    values = np.zeros(patterns.size, np.float32)
    values.view(np.uint16).reshape(-1, 2)[:, _HIGH] = patterns
    return values


@dataclass(frozen=True)
class _Codec:
    encode: Callable[[np.ndarray, Sequence[np.ndarray]], None]
    decode: Callable[[Weight, int, int], np.ndarray]


def _copy(saved: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    parts[0][:] = saved


def _decode_dense(parts: Weight, begin: int, end: int) -> np.ndarray:
    return parts[0][begin:end]


def _encode_split(saved: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    split(saved, parts[0], parts[1])


def _decode_split(parts: Weight, begin: int, end: int) -> np.ndarray:
    joined = np.empty(end - begin, np.float32)
    join(parts[0][begin:end], parts[1][begin:end], joined)
    return joined


def _decode_bfloat16(parts: Weight, begin: int, end: int) -> np.ndarray:
    return widened(parts[0][begin:end])


_WHOLE, _HALVES = _Codec(_copy, _decode_dense), _Codec(_encode_split, _decode_split)

_CODECS: Mapping[str, _Codec] = {
    DENSE.name: _WHOLE,
    SPLIT.name: _HALVES,
    BFLOAT16.name: _Codec(_copy, _decode_bfloat16),
    PACKED.name: _WHOLE,
    PACKED_SPLIT.name: _HALVES,
}
