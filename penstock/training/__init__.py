"""A training run from start to end, and the use of its weights afterwards."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.training.evaluation import bits_per_byte
    from penstock.training.export import export_run
    from penstock.training.prune import prune_model
    from penstock.training.trainer import Trainer

__all__ = ["Trainer", "bits_per_byte", "export_run", "prune_model"]

__getattr__ = lazily(
    __name__,
    {
        "Trainer": "trainer",
        "bits_per_byte": "evaluation",
        "export_run": "export",
        "prune_model": "prune",
    },
)
