"""The messages between nodes of a run: a fixed header, a body of JSON, raw bytes.

Reading a message runs no code, whatever its bytes are: the header is a packed struct, the body is
JSON, the payload is the memory of tensors. Acting on a message may run code: a worker compiles the
model that the message names. So a process accepts messages only from holders of the run's token
(`transport/handshake.py`), and between hosts nobody else can read or change a message
(`transport/tls.py`).

The payload follows the body, or is in a slot of shared memory (`transport/shared_memory.py`); the
header says which. Every frame carries the epoch in which it was sent, and a checksum (XXH3) over
the whole frame. The header has a checksum of its own, at its begin: a receiver that believed a
damaged length would wait for bytes that never come.
"""

import enum
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from penstock.errors import CorruptionError, DataError

# A body may name every weight of a model: a report on gradients the weights whose gradients are
# zero, such as experts without tokens; ASSIGN the capacities of sparse weights. The limit is that
# of 2^18 names with 256 bytes each.
MAX_BODY_BYTES = 1 << 26
MAX_PAYLOAD_BYTES = 1 << 30
_MOST_DIGITS = 300  # of an integer in a body: a float holds it
_HEADER = struct.Struct("<IBBHIIIIIIQIQQ")
_CHECK_BYTES, _DIGEST_BYTES = 4, 8  # of the header at its begin, of the frame at its end
HEADER_BYTES = _HEADER.size
_WHOLE_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_ARRAY_TYPES = ("bool", *_WHOLE_TYPES, "float16", "float32", "float64")


class MessageType(enum.IntEnum):
    """The type of a message.

    Three types carry the data: weights go out, gradients come back, credit allows more weights.
    """

    VIEW = 1  # coordinator: the nodes of this epoch
    VIEW_ACK = 2  # to the coordinator: the view has arrived
    BEGIN = 3  # coordinator: a step begins; carries an engine's rows
    WEIGHTS = 4  # shard to engine, engine to engine
    WEIGHT_CREDIT = 5  # engine to engine, engine to shard: operations that need no more weights
    GRADIENT = 6  # engine to engine, engine to shard: a partial sum
    LOSSES = 7  # engine to coordinator
    PREPARED = 8  # shard to coordinator: all gradients have arrived
    COMMIT = 9  # coordinator to shards: the step is decided
    COMMITTED = 10  # shard to coordinator
    FAILURE = 11  # to the coordinator: an error
    HEARTBEAT = 12  # to the coordinator: the node is alive; progress and received bytes
    CORRUPT_FRAME = 13  # to the coordinator: a frame with a wrong checksum has arrived
    HELD_STEPS = 14  # coordinator to shard: which steps are held; and the answer
    ROLLBACK = 15  # coordinator to shard: roll back to a step that all shards hold; and the answer
    # Between processes, outside the step protocol:
    HELLO = 16  # the node at the sender's end of a connection
    JOIN = 17  # to the coordinator's process: a process offers to be a worker
    ASSIGN = 18  # the role of the worker, and its run
    READY = 19  # the worker has taken the role
    ADMIN_REQUEST = 20  # from a command: change the run (`penstock scale`)
    ADMIN_REPLY = 21  # to a command
    RPC_REQUEST = 22  # from the trainer process: an operation on a shard's store
    RPC_REPLY = 23  # its result
    SNAPSHOT_REQUEST = 24  # replica to replica: send this portion of the state
    SNAPSHOT_CHUNK = 25  # the portion
    # Of a step that changes the masks of sparse weights:
    HISTOGRAM_REQUEST = 26  # coordinator to shards: count the entries for these selections
    HISTOGRAM_REPLY = 27  # shard to coordinator: the counts of its entries
    SPANS = 28  # to a node: measure; return what was measured so far; and the answer
    ROWS = 29  # coordinator to engine: the rows of the next step
    # How many operations' gradients a replica has stored, if its shard has several replicas: to the
    # coordinator; and from it to the streaming replica: how many all other replicas have stored.
    GRADIENT_CREDIT = 30
    # Between the two ends of a connection:
    SHM_OFFER = 100  # an offer of shared memory
    BUFFER_CREDIT = 101  # slots for reuse; empty: the receiver cannot map the shared memory


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    `size` is the bytes of the payload; a simulation may omit the payload itself. `to` is set by the
    sending endpoint. `op` numbers the operations of a step (`transfer_schedule.py`), `chunk` the
    chunks of an operation. `level` and `index` are the position of a gradient in the tree over
    micro-batches.
    """

    kind: MessageType
    epoch: int
    sender: int
    step: int = 0
    op: int = 0
    chunk: int = 0
    level: int = 0
    index: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)
    payload: np.ndarray | None = None
    size: int = 0
    to: int = 0


def message_with(payload: np.ndarray | None, **fields: Any) -> Message:
    """Return a message whose payload is the memory of an array, without a copy."""
    if payload is None:
        return Message(**fields)
    flat = np.ascontiguousarray(payload).reshape(-1).view(np.uint8)
    return Message(payload=flat, size=flat.nbytes, **fields)


def sent_on(message: Message, sender: int, payload: np.ndarray | None = None) -> Message:
    """Return a message for forwarding by `sender`, with the same or an equal payload."""
    return Message(
        message.kind,
        message.epoch,
        sender,
        message.step,
        message.op,
        message.chunk,
        message.level,
        message.index,
        message.body,
        message.payload if payload is None else payload,
        message.size,
    )


def pack(message: Message, slot: int | None = None) -> tuple[bytes, bytes]:
    """Return a message's header and body; the payload follows them, or is in a slot."""
    body = json.dumps(message.body).encode() if message.body else b""
    if len(body) > MAX_BODY_BYTES or message.size > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"expected at most {MAX_BODY_BYTES} bytes of body and {MAX_PAYLOAD_BYTES} of payload, "
            f"got {len(body)} and {message.size} in a {message.kind.name} message"
        )
    slot_field = 0 if slot is None else slot + 1
    bare = bytes(_CHECK_BYTES) + _header(message, slot_field, len(body), 0)[_CHECK_BYTES:]
    digest = _digest(bare, body, message.payload)
    return _header(message, slot_field, len(body), digest), body


def _header(message: Message, slot_field: int, body_bytes: int, digest: int) -> bytes:
    header = _HEADER.pack(
        0,
        message.kind,
        slot_field,
        message.level,
        message.epoch,
        message.sender,
        message.to,
        message.op,
        message.chunk,
        message.index,
        message.step,
        body_bytes,
        message.size,
        digest,
    )
    return _check(header) + header[_CHECK_BYTES:]


def _check(header: bytes) -> bytes:
    """Return the checksum of a header, without the place of the checksum."""
    return xxhash.xxh3_64_digest(header[_CHECK_BYTES:])[:_CHECK_BYTES]


def _digest(header: bytes, body: bytes, payload: np.ndarray | None) -> int:
    state = xxhash.xxh3_64(header)
    state.update(body)
    if payload is not None and payload.nbytes:
        state.update(payload.data)
    return state.intdigest()


def lengths(header: bytes) -> tuple[int, int]:
    """Return the bytes of body and payload that follow a header.

    Raises:
        CorruptionError: it is no header, or its lengths are over the limits.
    """
    *_, body_bytes, payload_bytes, _ = _HEADER.unpack(header)
    if header[:_CHECK_BYTES] != _check(header):
        raise CorruptionError("a frame's header is damaged: its checksum is wrong")
    if body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise CorruptionError(
            f"a frame has {body_bytes:,} bytes of body and {payload_bytes:,} of payload, expected "
            f"at most {MAX_BODY_BYTES:,} and {MAX_PAYLOAD_BYTES:,}"
        )
    return body_bytes, payload_bytes


def slot_of(header: bytes) -> int | None:
    """Return the slot that holds the payload; None if the payload follows the body."""
    slot_field = _HEADER.unpack(header)[2]
    return slot_field - 1 if slot_field else None


def unpack(header: bytes, body: bytes, payload: np.ndarray | None) -> Message:
    """Return the message of a complete frame.

    Raises:
        CorruptionError: the checksum is wrong, or the type of the message is unknown.
    """
    (_, kind, _, level, epoch, sender, to, op, chunk, index, step, _, size, digest) = (
        _HEADER.unpack(header)
    )
    bare = bytes(_CHECK_BYTES) + header[_CHECK_BYTES:-_DIGEST_BYTES] + bytes(_DIGEST_BYTES)
    found = _digest(bare, body, payload)
    if found != digest:
        raise CorruptionError(
            f"a frame of operation {op}, chunk {chunk}, from node {sender} has checksum "
            f"{found:016x}, expected {digest:016x}"
        )
    try:
        parsed = json.loads(body, parse_int=_whole) if body else {}
        known = MessageType(kind)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"a frame from node {sender} is malformed: {error}") from None
    if not isinstance(parsed, dict):
        raise CorruptionError(f"a frame from node {sender} has a body that is not a mapping")
    return Message(known, epoch, sender, step, op, chunk, level, index, parsed, payload, size, to)


def _whole(digits: str) -> int:
    """Return an integer of a body; in comparisons with floats larger ones would raise."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits, expected at most {_MOST_DIGITS}")
    return int(digits)


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[list[list[Any]], np.ndarray]:
    """Return the description of arrays for a body, and the concatenated bytes of the arrays.

    64-bit integers are sent in as few bytes as their values need: tokens in two bytes instead of
    eight.
    """
    described, parts = [], []
    for name, array in arrays.items():
        if array.dtype.name not in _ARRAY_TYPES:
            raise DataError(f"{name}: rows of {array.dtype} cannot be sent to engines")
        sent = np.ascontiguousarray(_narrowed(array))
        described.append([name, array.dtype.name, sent.dtype.name, list(array.shape)])
        parts.append(sent.reshape(-1).view(np.uint8))
    return described, np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def _narrowed(array: np.ndarray) -> np.ndarray:
    """Return the same values in the smallest integer type that holds all of them.

    Only 64-bit arrays are narrowed: a smaller type may be a shard's whole state, which would take
    too long to scan.
    """
    if array.dtype.name not in ("int64", "uint64") or not array.size:
        return array
    least, most = int(array.min()), int(array.max())
    for kind in map(np.dtype, _WHOLE_TYPES):
        limits = np.iinfo(kind)
        if kind.itemsize < array.itemsize and limits.min <= least and most <= limits.max:
            return array.astype(kind)
    return array


def unpack_arrays(described: Sequence[Any], payload: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the arrays that `pack_arrays` described.

    Raises:
        CorruptionError: the description does not match the bytes.
    """
    arrays: dict[str, np.ndarray] = {}
    rest = np.zeros(0, np.uint8) if payload is None else payload
    if not isinstance(described, (list, tuple)):
        raise CorruptionError(f"expected a list of arrays, got {str(described)[:80]!r}")
    for entry in described:
        name, kind, sent, shape = _array_entry(entry)
        size = np.dtype(sent).itemsize * int(np.prod(shape, dtype=object))
        if size > rest.nbytes:
            raise CorruptionError(f"{name}: expected {size} bytes, got {rest.nbytes}")
        try:
            arrays[name] = rest[:size].copy().view(sent).astype(kind, copy=False).reshape(shape)
        except (ValueError, OverflowError) as error:  # such as too many dimensions
            raise CorruptionError(f"{name}: the shape {shape} is impossible: {error}") from None
        rest = rest[size:]
    if rest.nbytes:
        raise CorruptionError(f"{rest.nbytes} bytes were received after the last array")
    return arrays


def _array_entry(entry: Any) -> tuple[str, str, str, list[int]]:
    try:
        name, kind, sent, shape = entry
    except (TypeError, ValueError):
        raise _invalid_entry(entry) from None
    sizes = isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape)
    kinds = kind in _ARRAY_TYPES if sent == kind else all(k in _WHOLE_TYPES for k in (kind, sent))
    if not isinstance(name, str) or not kinds or not sizes:
        raise _invalid_entry(entry)
    return name, kind, sent, shape


def _invalid_entry(entry: Any) -> CorruptionError:
    return CorruptionError(f"expected name, types and shape of an array, got {str(entry)[:80]!r}")


COORDINATOR = 0
