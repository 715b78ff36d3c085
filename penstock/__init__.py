"""Penstock trains neural networks larger than the device that computes them.

`Trainer` runs a configuration, `Config` is one. Both are imported when first used, so that the
command line starts without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Config", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Config":
        from penstock.config import Config

        return Config
    if name == "Trainer":
        from penstock.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
