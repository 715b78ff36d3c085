"""Checked fields of written programs: every value that is read has exactly the expected type."""

import json
from typing import Any

import torch

_LENGTH_BYTES = 8
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
"""The types of tensors by name."""
DEVICES = frozenset({"cpu", "cuda"})
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 62


class NotSerializableError(Exception):
    """A program contains something that has no written form; the text names it."""


class MalformedError(Exception):
    """Bytes are not those of a program; the text says what was expected."""


def framed(content: Any, *rest: bytes) -> bytes:
    """Return JSON and the bytes after it: the length of the JSON's text, the text, the bytes.

    **Raises:** `NotSerializableError` if `content` has a value that JSON does not have.
    """
    try:
        written = json.dumps(content, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise NotSerializableError(f"a field has another type: {error}") from error
    return b"".join((len(written).to_bytes(_LENGTH_BYTES, "little"), written, *rest))


def unframed(data: bytes | memoryview) -> tuple[Any, memoryview]:
    """Return what `framed` was given, the bytes in one piece.

    **Raises:** `MalformedError` if it is another form.
    """
    view = memoryview(data)
    end = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    if end > len(view):
        raise MalformedError(f"expected {end} bytes, got {len(view)}")
    try:
        return json.loads(bytes(view[_LENGTH_BYTES:end])), view[end:]
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"{type(error).__name__}: {error}") from error


def text(value: Any) -> str:
    """Return a string."""
    return _of_type(value, str)


def flag(value: Any) -> bool:
    """Return a truth value."""
    return _of_type(value, bool)


def number(value: Any) -> int:
    """Return an integer of at least 0."""
    if type(value) is not int or not 0 <= value < 1 << 80:
        raise MalformedError(f"expected an integer of at least 0, got {value!r:.80}")
    return value


def decimal(value: Any) -> float:
    """Return a floating-point number."""
    return _of_type(value, float)


def items(value: Any, length: int | None = None) -> list[Any]:
    """Return a list, of this length if one is given."""
    found: list[Any] = _of_type(value, list)
    if length is not None and len(found) != length:
        raise MalformedError(f"expected a list of {length} values, got {len(found)}")
    return found


def texts(value: Any) -> tuple[str, ...]:
    """Return strings."""
    return tuple(map(text, items(value)))


def flags(value: Any) -> tuple[bool, ...]:
    """Return truth values."""
    return tuple(map(flag, items(value)))


def numbers(value: Any) -> tuple[int, ...]:
    """Return integers of at least 0."""
    return tuple(map(number, items(value)))


def shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor."""
    sizes = numbers(value)
    if len(sizes) > _MOST_DIMENSIONS:
        raise MalformedError(f"expected at most {_MOST_DIMENSIONS} dimensions, got {len(sizes)}")
    elements = 1
    for size in sizes:
        elements *= max(size, 1)
    if elements > _MOST_ELEMENTS:
        raise MalformedError(f"no tensor has the shape {sizes}")
    return sizes


def dtype(value: Any) -> torch.dtype:
    """Return a type of tensors by its name."""
    name = text(value)
    if name not in DTYPES:
        raise MalformedError(f"expected a type of tensors, got {name!r:.80}")
    return DTYPES[name]


def device(value: Any) -> str:
    """Return the name of a kind of device."""
    name = text(value)
    if name not in DEVICES:
        raise MalformedError(f"expected a kind of device, got {name!r:.80}")
    return name


def mapping(value: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return a mapping with exactly these keys."""
    found: dict[str, Any] = _of_type(value, dict)
    if tuple(found) != keys:
        raise MalformedError(f"expected the keys {keys}, got {tuple(found)!r:.200}")
    return found


def _of_type(value: Any, wanted: type) -> Any:
    if type(value) is not wanted:
        raise MalformedError(f"expected a {wanted.__name__}, got {value!r:.80}")
    return value
