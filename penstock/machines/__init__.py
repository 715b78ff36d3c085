"""Machines as data: descriptions in YAML, the library of known machines, and this host's own.

No module here imports torch but those that measure.
"""

from penstock.machines.description import (
    Accuracy,
    EnginePart,
    FlashPart,
    LinkPart,
    MachineDescription,
    ProcessesPart,
    StorePart,
)
from penstock.machines.gpu_cluster import (
    GpuCluster,
    ValueType,
    known_gpu_clusters,
    load_gpu_cluster,
)
from penstock.machines.load import dump, known_machines, load_any, load_machine
from penstock.machines.median import median_machine
from penstock.machines.operator_time import operator_seconds, sum_seconds
from penstock.machines.rates import IN_FLOPS, RateCurve, RateTable, Work

__all__ = [
    "IN_FLOPS",
    "Accuracy",
    "EnginePart",
    "FlashPart",
    "GpuCluster",
    "LinkPart",
    "MachineDescription",
    "ProcessesPart",
    "RateCurve",
    "RateTable",
    "StorePart",
    "ValueType",
    "Work",
    "dump",
    "known_gpu_clusters",
    "known_machines",
    "load_any",
    "load_gpu_cluster",
    "load_machine",
    "median_machine",
    "operator_seconds",
    "sum_seconds",
]
