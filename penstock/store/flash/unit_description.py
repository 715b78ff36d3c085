"""The entries of a unit's description, in the first record of a journal."""

from collections.abc import Mapping
from typing import Any

from penstock.weight_formats import DENSE, FORMATS, SPLIT, WeightFormat


def described_format(unit: Mapping[str, Any]) -> WeightFormat:
    """Return the format in the description of a unit."""
    if "format" in unit:
        return FORMATS[unit["format"]]
    return SPLIT if unit["split"] else DENSE


def spelled_format(weight_format: WeightFormat) -> dict[str, Any]:
    """Return the description's entry for a unit's format.

    The two formats of the first releases keep their first spelling, so that those releases can read
    the description.
    """
    if weight_format in (DENSE, SPLIT):
        return {"split": weight_format is SPLIT}
    return {"format": weight_format.name}


def spelled_capacity(capacity: int) -> dict[str, int]:
    """Return the description's entry for the capacity of a sparse weight; empty for others."""
    return {"capacity": capacity} if capacity else {}


def spelled_origins(begins: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the description's entry for where pieces begin; empty for whole weights."""
    pieces = {name: begin for name, begin in begins.items() if begin}
    return {"origins": pieces} if pieces else {}
