"""The nodes of a run as state machines: what each makes of a message, whoever carries it."""

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.coordinator import Coordinator
from penstock.distributed.protocol.engine_node import EngineExecutor, EngineNode
from penstock.distributed.protocol.messages import COORDINATOR
from penstock.distributed.protocol.node_context import NodeContext
from penstock.distributed.protocol.shard_node import GRADIENTS, WINDOW, ShardExecutor, ShardNode
from penstock.distributed.protocol.step_request import (
    EngineInput,
    ProtocolEvent,
    RolledBackError,
    StepRequest,
    StepResult,
    Timeouts,
    UnrecoverableError,
)
from penstock.distributed.protocol.step_transaction import Phase

__all__ = [
    "COORDINATOR",
    "GRADIENTS",
    "WINDOW",
    "Coordinator",
    "EngineExecutor",
    "EngineInput",
    "EngineNode",
    "NodeContext",
    "Phase",
    "ProtocolEvent",
    "RolledBackError",
    "ShardExecutor",
    "ShardNode",
    "StepRequest",
    "StepResult",
    "Timeouts",
    "UnrecoverableError",
    "message_validation",
]
