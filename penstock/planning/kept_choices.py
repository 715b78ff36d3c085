"""The choices of sparse products that earlier runs have measured on this host.

They are entries of the user's cache folder, named by a digest of everything that a choice depends
on: the case, the processor, its caches, the number of threads, and the sources of this package. A
measurement that other programs have disturbed is not kept.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping

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
        except (ValueError, RecursionError, ConfigError):
            remove_entry(key, "products")
    return found


def keep_choices(choices: Mapping[ProductCase, Choice], before: CoreUse | None) -> None:
    """Keep choices for later runs on this host, unless other programs, or others on the hypervisor,
    have disturbed their measurement.

    **Arguments:** `before` is the use of the cores when the measurement began; None if the system
    does not report it, which is then taken for quiet.
    """
    if max(CoreUse.shares(before)) > MOST_DISTURBANCE:
        return
    for case, choice in choices.items():
        write_entry(_key(case), json.dumps(choice.as_record()).encode(), "products")


def forget_choices() -> None:
    """Remove all kept choices: the next run measures."""
    remove_entries("products")


def _key(case: ProductCase) -> str:
    threads = (numba.get_num_threads(), torch.get_num_threads())
    parts = (code_digest(), processor_name(), cache_bytes(), threads, str(case))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
