"""One step of training: in this process, or distributed over several."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.step.distributed import DistributedStepRunner
    from penstock.step.local import StepRunner
    from penstock.step.local_engines import (
        LocalEngines,
        choose_devices,
        counted,
        make_local_engines,
    )
    from penstock.step.micro_batches import Batches, to_tensors

__all__ = [
    "Batches",
    "DistributedStepRunner",
    "LocalEngines",
    "StepRunner",
    "choose_devices",
    "counted",
    "make_local_engines",
    "to_tensors",
]

__getattr__ = lazily(
    __name__,
    {
        "Batches": "micro_batches",
        "DistributedStepRunner": "distributed",
        "LocalEngines": "local_engines",
        "StepRunner": "local",
        "choose_devices": "local_engines",
        "counted": "local_engines",
        "make_local_engines": "local_engines",
        "to_tensors": "micro_batches",
    },
)
