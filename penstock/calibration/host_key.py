"""What the measurements of a host depend on."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from penstock.kernels.processor import processor_name
from penstock.machines import MachineDescription
from penstock.user_folders import cache_folder

MEASUREMENTS = 5
"""Raised when the measurements change, or the libraries that they measure, so that kept figures are
measured again."""

KEY = "key"
"""The entry of a kept machine's sources that says what its figures depend on."""


@dataclass(frozen=True)
class HostKey:
    """What the figures of a host depend on.

    Attributes:
        processor: its name, as the system reports it.
        cores: that this process may use.
        torch, numba: versions.
        form: of the description and of the measurements.
    """

    processor: str
    cores: int
    torch: str
    numba: str
    form: str

    @classmethod
    def here(cls) -> HostKey:
        """Return the key of this host."""
        return cls(
            processor_name(),
            len(os.sched_getaffinity(0)),
            metadata.version("torch"),
            metadata.version("numba"),
            f"{MEASUREMENTS}.{_form_digest()}",
        )

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.cores} cores, torch {self.torch}, numba {self.numba}, "
            f"measurements {self.form}"
        )


def kept_file(key: HostKey) -> Path:
    """Return the file in which the measurements of a host are kept."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "machines" / f"host-{digest}.yaml"


@functools.cache
def _form_digest() -> str:
    """Return a digest of the keys and types of a machine description."""
    return hashlib.sha256("\n".join(_keys(MachineDescription)).encode()).hexdigest()[:8]


def _keys(section: type[BaseModel]) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{section.__name__}.{name}: {field.annotation}"
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _keys(inner)
