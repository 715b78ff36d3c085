"""The hot loops: compiled on first use, in parallel, the same to the bit on any number of threads.

Arrays are flat NumPy arrays; bfloat16 travels as its uint16 patterns. Names are loaded on first
use, so that `import penstock.kernels` costs nothing until something is computed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.kernels.adamw import adamw
    from penstock.kernels.cross_entropy import cross_entropy, cross_entropy_and_gradient
    from penstock.kernels.gradients import add_gradient, copy_gradient, sum_of_squares
    from penstock.kernels.lion import lion
    from penstock.kernels.memory import allocate
    from penstock.kernels.philox import dropout_mask
    from penstock.kernels.sgd import sgd, sgd_momentum
    from penstock.kernels.split_master import join, split

_HOMES = {
    "adamw": "adamw",
    "add_gradient": "gradients",
    "allocate": "memory",
    "copy_gradient": "gradients",
    "cross_entropy": "cross_entropy",
    "cross_entropy_and_gradient": "cross_entropy",
    "dropout_mask": "philox",
    "join": "split_master",
    "lion": "lion",
    "sgd": "sgd",
    "sgd_momentum": "sgd",
    "split": "split_master",
    "sum_of_squares": "gradients",
}

__all__ = [
    "adamw",
    "add_gradient",
    "allocate",
    "copy_gradient",
    "cross_entropy",
    "cross_entropy_and_gradient",
    "dropout_mask",
    "join",
    "lion",
    "sgd",
    "sgd_momentum",
    "split",
    "sum_of_squares",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
