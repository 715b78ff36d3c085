"""Penstock trains neural networks larger than the device that computes them.

`Trainer` runs a configuration, and `Config` is a configuration. Both are imported at first use, so
that the command line starts without torch.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.training import Trainer

# PyTorch and Numba each have a pool of OpenMP threads. By default the threads of an idle pool spin
# for milliseconds on cores that the other pool needs, so they are configured to sleep, but only
# after a spin of a fraction of a millisecond: most operators follow each other faster than that,
# and waking a thread takes as long as a small operator. torch reads these settings at import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.1.0"
__all__ = ["Config", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Config":
        from penstock.config import Config

        return Config
    if name == "Trainer":
        from penstock.training import Trainer

        return Trainer
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
