"""Byte sizes in user notation: `4GiB`, `512MiB`, `2GB`, `1.5 TiB`; or a number of bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
}
_PRINTED = ("PiB", "PB", "TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB")
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_EXPECTED = "expected a size such as 4GiB, 512MiB or 2GB"
_MOST_DIGITS = 30
_LEAST_COUNT = 1 << 16
"""A smaller number without a unit is rejected: the unit was probably forgotten."""


class ByteSize(int):
    """A positive integer number of bytes, printed exactly, in the unit with the shortest number."""

    @classmethod
    def parse(cls, value: object) -> ByteSize:
        """Return the size that an int or a string such as `4GiB` represents.

        Raises `ValueError` whose text states the expected value, the actual value and the next
        action.
        """
        if isinstance(value, ByteSize):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            if 0 < value < _LEAST_COUNT:
                raise ValueError(f"{_EXPECTED}, got {value}; it has no unit: write {value}GiB")
            return cls._positive(value, value)
        if not isinstance(value, str):
            raise ValueError(f"{_EXPECTED}, got {value!r}; write a number and a unit")
        match = _PATTERN.fullmatch(value)
        if match is None:
            raise ValueError(f"{_EXPECTED}, got {value!r}; write a number and a unit")
        number, unit = match[1], match[2].lower()
        if unit not in _UNITS:
            missing = f"{number} has no unit" if not unit else f"{match[2]!r} is not a unit"
            raise ValueError(f"{_EXPECTED}, got {value!r}; {missing}: use KiB, MiB, GiB or TiB")
        scale = _UNITS[unit]
        if len(number) > _MOST_DIGITS:
            raise ValueError(f"{_EXPECTED}, got a number of {len(number)} digits; write a size")
        whole = int(number) * scale if "." not in number else int(float(number) * scale)
        return cls._positive(whole, value)

    @classmethod
    def _positive(cls, count: int, shown: object) -> ByteSize:
        if count < 1:
            raise ValueError(f"{_EXPECTED}, got {shown!r}; it must be at least one byte")
        return cls(count)

    def __str__(self) -> str:
        units = ((name, _UNITS[name.lower()]) for name in _PRINTED)
        exact = [f"{int(self) // scale}{name}" for name, scale in units if self % scale == 0]
        return min(exact, key=_digits, default=f"{int(self)}B")

    def __repr__(self) -> str:
        return f"ByteSize({str(self)!r})"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _validated, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


def _digits(text: str) -> int:
    return sum(map(str.isdigit, text))


def _validated(value: object) -> ByteSize:
    try:
        return ByteSize.parse(value)
    except ValueError as error:
        raise PydanticCustomError("size", "{text}", {"text": str(error)}) from None


def size_or_auto(value: object) -> ByteSize | str:
    """Validate a field that is a size or the word `auto`."""
    if value == "auto":
        return "auto"
    try:
        return ByteSize.parse(value)
    except ValueError as error:
        text = str(error).replace(_EXPECTED, f"{_EXPECTED}, or auto", 1)
        raise PydanticCustomError("size", "{text}", {"text": text}) from None


def sizes_and_limit(sizes: Sequence[int], limit: int) -> list[str]:
    """Format numbers of bytes rounded up, and their limit rounded down, in one unit up to GiB.

    A size above the limit is therefore above the limit in print too.
    """
    largest = max([*sizes, limit])
    units = ((2**30, "GiB"), (2**20, "MiB"))
    unit, name = next((each for each in units if largest >= each[0]), (2**10, "KiB"))
    hundredths = [*(-(-100 * size // unit) for size in sizes), 100 * limit // unit]
    return [f"{number / 100:.2f} {name}" for number in hundredths]


def size_above(size: int) -> str:
    """Format a number of bytes rounded up, so that the printed size is sufficient."""
    for unit, name in ((2**50, "PiB"), (2**40, "TiB")):
        if size >= unit:
            return f"{math.ceil(100 * size / unit) / 100:.2f} {name}"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit / 10:
            return f"{math.ceil(100 * size / unit) / 100:.2f} {name}"
    return f"{size} B"
