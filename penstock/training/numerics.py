"""What decides the last bits of a step, apart from the configuration.

The record of a run has it, so that a resume can tell that its bits may differ from those of a run
without an interruption.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

import penstock
from penstock.config import Config
from penstock.engine import thread_count
from penstock.kernels.processor import processor_name

# The folders whose code computes.
_COMPUTE = ("collectives", "compiler", "engine", "kernels", "sparsity", "step", "store")


def numerics_here(config: Config, device: str) -> dict[str, str]:
    """Return the numerics of a run in this process, whose engines compute on `device`.

    **Returns:** the processor of this host and the instructions that PyTorch uses, the device, the
    CPU threads of an engine, the versions of the libraries, and that of Penstock with a digest of
    the sources that compute.
    """
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "threads": str(thread_count(config.engine.threads)),
        **_of_this_process(penstock.__version__),
    }


def changed_numerics(recorded: Mapping[str, str] | None, now: Mapping[str, str]) -> str | None:
    """Return a notice of what differs from the numerics of a record; None if nothing does.

    **Arguments:** `recorded` is None in the record of an older release.
    """
    changes = [
        f"{name} {then} -> {now[name]}"
        for name, then in (recorded or {}).items()
        if now.get(name, then) != then
    ]
    if not changes:
        return None
    return (
        f"what computes this run has changed since its last step ({', '.join(changes)}): later "
        "steps may differ in their last bits from those of a run without an interruption"
    )


@functools.cache
def _of_this_process(release: str) -> dict[str, str]:
    """Return what stays the same: every step records its numerics."""
    root, digest = Path(penstock.__file__).parent, hashlib.blake2b(digest_size=4)
    for source in sorted(path for name in _COMPUTE for path in (root / name).rglob("*.py")):
        digest.update(source.read_bytes())
    return {
        "processor": f"{processor_name()} with {torch.backends.cpu.get_cpu_capability()}",
        "torch": metadata.version("torch"),
        "numba": metadata.version("numba"),
        "penstock": f"{release} ({digest.hexdigest()})",
    }
