"""The state machines of a run's nodes and the messages between them, without I/O and threads."""

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.coordinator import Coordinator
from penstock.distributed.protocol.engine_node import EngineExecutor, EngineNode
from penstock.distributed.protocol.messages import (
    COORDINATOR,
    HEADER_BYTES,
    Message,
    MessageType,
    lengths,
    message_with,
    pack,
    pack_arrays,
    sent_on,
    slot_of,
    unpack,
    unpack_arrays,
)
from penstock.distributed.protocol.node_context import BoundContext, Job, NodeContext
from penstock.distributed.protocol.relay_node import RelayNode
from penstock.distributed.protocol.relay_topology import enough_relays
from penstock.distributed.protocol.routes import connections
from penstock.distributed.protocol.shard_node import GRADIENTS, WINDOW, ShardExecutor, ShardNode
from penstock.distributed.protocol.span_messages import MOST_SPANS, clock_of, measured_of
from penstock.distributed.protocol.step_request import (
    EngineInput,
    ProtocolEvent,
    RolledBackError,
    StepRequest,
    StepResult,
    Timeouts,
    UnrecoverableError,
    WithoutMasks,
)
from penstock.distributed.protocol.step_transaction import Phase
from penstock.distributed.protocol.transfer_schedule import (
    CHUNK_BYTES,
    GRADIENT_WIDTH,
    SPARSE_HEADER_BYTES,
    Chunk,
    SparseChunk,
    TransferOperation,
    TransferSchedule,
    chunks,
    sparse_chunks,
)

__all__ = [
    "CHUNK_BYTES",
    "COORDINATOR",
    "GRADIENTS",
    "GRADIENT_WIDTH",
    "HEADER_BYTES",
    "MOST_SPANS",
    "SPARSE_HEADER_BYTES",
    "WINDOW",
    "BoundContext",
    "Chunk",
    "Coordinator",
    "EngineExecutor",
    "EngineInput",
    "EngineNode",
    "Job",
    "Message",
    "MessageType",
    "NodeContext",
    "Phase",
    "ProtocolEvent",
    "RelayNode",
    "RolledBackError",
    "ShardExecutor",
    "ShardNode",
    "SparseChunk",
    "StepRequest",
    "StepResult",
    "Timeouts",
    "TransferOperation",
    "TransferSchedule",
    "UnrecoverableError",
    "WithoutMasks",
    "chunks",
    "clock_of",
    "connections",
    "enough_relays",
    "lengths",
    "measured_of",
    "message_validation",
    "message_with",
    "pack",
    "pack_arrays",
    "sent_on",
    "slot_of",
    "sparse_chunks",
    "unpack",
    "unpack_arrays",
]
