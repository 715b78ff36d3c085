"""One step of training: in this process, or distributed over several."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.step.distributed import DistributedStepRunner as DistributedStepRunner
    from penstock.step.local import StepRunner as StepRunner
    from penstock.step.local_engines import (
        LocalEngines as LocalEngines,
        choose_devices as choose_devices,
        counted as counted,
        make_local_engines as make_local_engines,
    )
    from penstock.step.micro_batches import (
        Batches as Batches,
        failure_of_source as failure_of_source,
        refuse_unknown_tokens as refuse_unknown_tokens,
        to_tensors as to_tensors,
    )

__getattr__ = lazily(__name__, __file__)
