"""Builds of data sets that are refused, and what they leave in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.data import build_dataset
from penstock.errors import DataError, PenstockError


def leftovers(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(os.listdir(folder))


def refused(
    folder: Path, *args: Any, error: type[PenstockError] = DataError, **options: Any
) -> str:
    """Return the message with which a build is refused; it leaves nothing in the folder."""
    before = leftovers(folder)
    with pytest.raises(error) as caught:
        build_dataset(*args, **options)
    assert leftovers(folder) == before
    return str(caught.value)
