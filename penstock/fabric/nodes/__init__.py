"""The nodes of a run as state machines: what each makes of a message, whoever carries it."""

from penstock.fabric.nodes import checks
from penstock.fabric.nodes.conductor import Conductor
from penstock.fabric.nodes.engine import EngineNode, EngineWork
from penstock.fabric.nodes.frame import CONDUCTOR
from penstock.fabric.nodes.orders import (
    Happened,
    Leases,
    Outcome,
    Part,
    Phase,
    StepOrder,
    TroubleError,
    WentBackError,
)
from penstock.fabric.nodes.runtime import Runtime
from penstock.fabric.nodes.shard import GRADIENTS, WINDOW, ShardNode, ShardWork

__all__ = [
    "CONDUCTOR",
    "GRADIENTS",
    "WINDOW",
    "Conductor",
    "EngineNode",
    "EngineWork",
    "Happened",
    "Leases",
    "Outcome",
    "Part",
    "Phase",
    "Runtime",
    "ShardNode",
    "ShardWork",
    "StepOrder",
    "TroubleError",
    "WentBackError",
    "checks",
]
