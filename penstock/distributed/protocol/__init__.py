"""The state machines of a run's nodes and the messages between them, without I/O and threads."""

from penstock.distributed.protocol import message_validation as message_validation
from penstock.distributed.protocol.coordinator import Coordinator as Coordinator
from penstock.distributed.protocol.engine_node import EngineNode as EngineNode
from penstock.distributed.protocol.failure_detector import (
    FailureDetector as FailureDetector,
    StallTimer as StallTimer,
)
from penstock.distributed.protocol.messages import (
    COORDINATOR as COORDINATOR,
    HEADER_BYTES as HEADER_BYTES,
    Message as Message,
    MessageType as MessageType,
    lengths as lengths,
    message_with as message_with,
    pack as pack,
    pack_arrays as pack_arrays,
    sent_on as sent_on,
    slot_of as slot_of,
    unpack as unpack,
    unpack_arrays as unpack_arrays,
)
from penstock.distributed.protocol.node_context import (
    BoundContext as BoundContext,
    Job as Job,
    NodeContext as NodeContext,
)
from penstock.distributed.protocol.relay_node import RelayNode as RelayNode
from penstock.distributed.protocol.relay_topology import enough_relays as enough_relays
from penstock.distributed.protocol.routes import connections as connections
from penstock.distributed.protocol.shard_node import (
    GRADIENTS as GRADIENTS,
    WINDOW as WINDOW,
    ShardNode as ShardNode,
)
from penstock.distributed.protocol.span_messages import (
    MOST_SPANS as MOST_SPANS,
    clock_of as clock_of,
    measured_of as measured_of,
)
from penstock.distributed.protocol.step_request import (
    EngineInput as EngineInput,
    ProtocolEvent as ProtocolEvent,
    RolledBackError as RolledBackError,
    StepResult as StepResult,
    Timeouts as Timeouts,
    UnrecoverableError as UnrecoverableError,
    WithoutMasks as WithoutMasks,
)
from penstock.distributed.protocol.step_transaction import Phase as Phase
from penstock.distributed.protocol.transfer_schedule import (
    CHUNK_BYTES as CHUNK_BYTES,
    GRADIENT_WIDTH as GRADIENT_WIDTH,
    SPARSE_HEADER_BYTES as SPARSE_HEADER_BYTES,
    Chunk as Chunk,
    SparseChunk as SparseChunk,
    TransferOperation as TransferOperation,
    TransferSchedule as TransferSchedule,
    chunks as chunks,
    sparse_chunks as sparse_chunks,
)
