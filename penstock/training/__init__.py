"""A training run from start to end, and the use of its weights afterwards."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.training.export import describe_base as describe_base, export_run as export_run
    from penstock.training.kernel_worker import KernelWorker as KernelWorker
    from penstock.training.prune import prune_model as prune_model
    from penstock.training.trainer import Trainer as Trainer

__getattr__ = lazily(__name__, __file__)
