"""Machines as data: descriptions in YAML, the library of known machines, and this host's own.

No module here imports torch but those that measure.
"""

from penstock.machines.description import (
    Accuracy as Accuracy,
    EnginePart as EnginePart,
    FlashPart as FlashPart,
    LinkPart as LinkPart,
    MachineDescription as MachineDescription,
    ProcessesPart as ProcessesPart,
    StorePart as StorePart,
)
from penstock.machines.gpu_cluster import (
    GpuCluster as GpuCluster,
    ValueType as ValueType,
    known_gpu_clusters as known_gpu_clusters,
    load_gpu_cluster as load_gpu_cluster,
)
from penstock.machines.load import (
    dump as dump,
    known_machines as known_machines,
    load_any as load_any,
    load_machine as load_machine,
)
from penstock.machines.median import (
    FLASH_DEVICE as FLASH_DEVICE,
    median_machine as median_machine,
    of_last_disk as of_last_disk,
)
from penstock.machines.operator_time import (
    operator_seconds as operator_seconds,
    sum_seconds as sum_seconds,
)
from penstock.machines.rates import (
    IN_FLOPS as IN_FLOPS,
    RateCurve as RateCurve,
    RateTable as RateTable,
    Work as Work,
)
