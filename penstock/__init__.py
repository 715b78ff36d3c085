"""Penstock trains neural networks larger than the device that computes them.

`Trainer` runs a configuration, and `Config` is a configuration. Both are imported at first use, so
that the command line starts without torch.
"""

import os
from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.config import Config as Config
    from penstock.training import Trainer as Trainer

# PyTorch and Numba each have a pool of OpenMP threads. By default the threads of an idle pool spin
# for milliseconds on cores that the other pool needs, so they are configured to sleep, but only
# after a spin of a fraction of a millisecond: most operators follow each other faster than that,
# and waking a thread takes as long as a small operator. torch reads these settings at import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

__version__ = "0.1.0"

__getattr__ = lazily(__name__, __file__)
