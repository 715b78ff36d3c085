"""The choices of sparse products that earlier runs have measured on this host.

They are entries of the user's cache folder, named by a digest of everything that a choice depends
on: the case, the processor, its caches, the number of threads, and the sources of this package. A
measurement that other programs have disturbed is not kept.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numba
import torch

from penstock.engine import ProductCase
from penstock.errors import ConfigError
from penstock.kernels.processor import processor_name
from penstock.planning.program_cache import (
    code_digest,
    read_entry,
    remove_entries,
    remove_entry,
    write_entry,
)
from penstock.sparsity import Choice, cache_bytes
from penstock.telemetry import CoreUse

MOST_DISTURBANCE = 0.1
"""The share of the cores' time that others may take from a measurement that is kept."""


def kept_choices(cases: Iterable[ProductCase]) -> dict[ProductCase, Choice]:
    """Return the kept choices of some cases."""
    found = {}
    for case in cases:
        key = _key(case)
        content = read_entry(key, "products")
        if content is None:
            continue
        try:
            found[case] = Choice.from_record(json.loads(bytes(content)))
        except (ValueError, ConfigError):
            remove_entry(key, "products")
    return found


def keep_choices(choices: Mapping[ProductCase, Choice]) -> None:
    """Keep choices for later runs on this host."""
    for case, choice in choices.items():
        write_entry(_key(case), json.dumps(choice.as_record()).encode(), "products")


def forget_choices() -> None:
    """Remove all kept choices: the next run measures."""
    remove_entries("products")


@dataclass
class Disturbance:
    """Whether other programs, or others on the hypervisor, took too much of the cores meanwhile."""

    is_great: bool = False


@contextmanager
def disturbance() -> Iterator[Disturbance]:
    """Yield an object that says, after the block, whether others have disturbed it.

    A system that does not report the use of its cores is taken for quiet.
    """
    found, before = Disturbance(), CoreUse.now()
    yield found
    after = CoreUse.now()
    if before is not None and after is not None:
        found.is_great = max(after.shares_since(before)) > MOST_DISTURBANCE


def _key(case: ProductCase) -> str:
    threads = (numba.get_num_threads(), torch.get_num_threads())
    parts = (code_digest(), processor_name(), cache_bytes(), threads, str(case))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
