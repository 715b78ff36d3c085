"""The nodes of a run as state machines: what each makes of a message, whoever carries it."""

from penstock.fabric.nodes.conductor import Conductor, Happened, Leases, Outcome, Part, TroubleError
from penstock.fabric.nodes.engine import CONDUCTOR, EngineNode, EngineWork
from penstock.fabric.nodes.runtime import Runtime
from penstock.fabric.nodes.shard import WINDOW, ShardNode, ShardWork

__all__ = [
    "CONDUCTOR",
    "WINDOW",
    "Conductor",
    "EngineNode",
    "EngineWork",
    "Happened",
    "Leases",
    "Outcome",
    "Part",
    "Runtime",
    "ShardNode",
    "ShardWork",
    "TroubleError",
]
