"""The nodes of a run as state machines: what each makes of a message, whoever carries it."""

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.coordinator import Conductor
from penstock.distributed.protocol.engine_node import EngineNode, EngineWork
from penstock.distributed.protocol.messages import CONDUCTOR
from penstock.distributed.protocol.node_context import Runtime
from penstock.distributed.protocol.shard_node import GRADIENTS, WINDOW, ShardNode, ShardWork
from penstock.distributed.protocol.step_request import (
    Happened,
    Leases,
    Outcome,
    Part,
    StepOrder,
    TroubleError,
    WentBackError,
)
from penstock.distributed.protocol.step_transaction import Phase

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
    "message_validation",
]
