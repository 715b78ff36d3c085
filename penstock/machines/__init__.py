"""Machines as data: descriptions in YAML, the library of known machines, and this host's own.

No module here imports torch but those that measure.
"""

from penstock.machines.description import (
    Accuracy,
    EnginePart,
    FlashPart,
    LinkPart,
    MachineDescription,
    StorePart,
)
from penstock.machines.load import dump, known_machines, load_machine
from penstock.machines.rates import IN_FLOPS, RateCurve, RateTable, Work

__all__ = [
    "IN_FLOPS",
    "Accuracy",
    "EnginePart",
    "FlashPart",
    "LinkPart",
    "MachineDescription",
    "RateCurve",
    "RateTable",
    "StorePart",
    "Work",
    "dump",
    "known_machines",
    "load_machine",
]
