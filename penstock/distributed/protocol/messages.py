"""What nodes of a run say to each other: a fixed header, a small body of JSON, raw bytes.

To read a message runs no code, whatever bytes come: the header is a packed struct, the body is
JSON, the payload is the memory of tensors. To do what it says may: a worker compiles the model that
it is told of. So only who has the run's token is heard (`transport/handshake.py`), and between
hosts nobody else can read or change a message (`transport/tls.py`). The payload follows the body,
or lies in a slot of memory that both ends see (`transport/shared_memory.py`), and the header says
which. Every frame carries the epoch in which it was sent, and a checksum (XXH3) over all of it.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from penstock.errors import CorruptionError, DataError

MAX_BODY_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 1 << 30
_MAGIC = b"PNSK"
_HEADER = struct.Struct("<4sBBHIIIIIIQIQQ")
HEADER_BYTES = _HEADER.size
_WHOLE_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_ARRAY_TYPES = ("bool", *_WHOLE_TYPES, "float16", "float32", "float64")


class MessageType(enum.IntEnum):
    """What a message is. Of the data: weights go out, gradients come back, room is given back."""

    VIEW = 1  # coordinator: who takes part from this epoch on
    VIEW_ACK = 2  # to the coordinator: the epoch's view has come
    BEGIN = 3  # coordinator: a step begins; an engine's rows are with it
    WEIGHTS = 4  # shard to engine, engine to engine
    WEIGHT_CREDIT = (
        5  # engine to engine, engine to shard: so many operations need no weights any more
    )
    GRADIENT = 6  # engine to engine, engine to shard: a node of the sum
    LOSSES = 7  # engine to coordinator
    PREPARED = 8  # shard to coordinator: all gradients are here
    COMMIT = 9  # coordinator to shards: the step is decided
    COMMITTED = 10  # shard to coordinator
    FAILURE = 11  # to the coordinator: what went wrong
    HEARTBEAT = 12  # to the coordinator: still here, and how far
    CORRUPT_FRAME = 13  # to the coordinator: a frame has come whose checksum is wrong
    HELD_STEPS = 14  # coordinator to shard: which steps do you hold? And the answer
    ROLLBACK = 15  # coordinator to shard: go back to a step that all hold. And the answer
    # Between processes, beside the step:
    HELLO = 16  # which node is at this end of a link
    JOIN = 17  # to the coordinator's process: a process that would take part
    ASSIGN = 18  # what it is to be, and of which run
    READY = 19  # it is
    ADMIN_REQUEST = 20  # from a command: change the run (`penstock scale`)
    ADMIN_REPLY = 21  # to a command
    RPC_REQUEST = 22  # from the run's process: have a shard's store do something
    RPC_REPLY = 23  # what came of it
    SNAPSHOT_REQUEST = (
        24  # shard to shard, which hold the same: give me this portion of what you hold
    )
    SNAPSHOT_CHUNK = 25  # here it is
    # Between the two ends of a link:
    SHM_OFFER = 100  # here is memory that you may see too
    BUFFER_CREDIT = 101  # these slots of yours may be used again; none: it is not seen here


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `size` is the bytes of the payload, which a simulation may leave out; `to` is
    filled in where it is sent.

    `op` numbers the operations of a step (`transfer_schedule.py`), `chunk` the chunks of an
    operation; `level` and `index` are the place of a gradient in the tree over micro-batches.
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
    """Return a message whose payload is the memory of an array, uncopied."""
    if payload is None:
        return Message(**fields)
    flat = np.ascontiguousarray(payload).reshape(-1).view(np.uint8)
    return Message(payload=flat, size=flat.nbytes, **fields)


def sent_on(message: Message, sender: int, payload: np.ndarray | None = None) -> Message:
    """Return a message as another node sends it on: the same payload, or one that equals it."""
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
    """Return a message's header and body; its payload follows as it is, or is in a slot."""
    body = json.dumps(message.body).encode() if message.body else b""
    if len(body) > MAX_BODY_BYTES or message.size > MAX_PAYLOAD_BYTES:
        raise ValueError(f"a message {message.kind.name} of {len(body)} + {message.size} bytes")
    place = 0 if slot is None else slot + 1
    digest = _digest(_header(message, place, len(body), 0), body, message.payload)
    return _header(message, place, len(body), digest), body


def _header(message: Message, place: int, body_bytes: int, digest: int) -> bytes:
    return _HEADER.pack(
        _MAGIC,
        message.kind,
        place,
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


def _digest(header: bytes, body: bytes, payload: np.ndarray | None) -> int:
    state = xxhash.xxh3_64(header)
    state.update(body)
    if payload is not None and payload.nbytes:
        state.update(payload.data)
    return state.intdigest()


def lengths(header: bytes) -> tuple[int, int]:
    """Return the bytes of body and payload that follow a header.

    Raises:
        CorruptionError: it is no header, or claims more than any message has.
    """
    magic, *_, body_bytes, payload_bytes, _ = _HEADER.unpack(header)
    if magic != _MAGIC or body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise CorruptionError("a frame's header is damaged: it begins or ends where none does")
    return body_bytes, payload_bytes


def slot_of(header: bytes) -> int | None:
    """Return the slot in which the payload of a header is; None if it follows."""
    place = _HEADER.unpack(header)[2]
    return place - 1 if place else None


def unpack(header: bytes, body: bytes, payload: np.ndarray | None) -> Message:
    """Return the message of a frame that has come whole.

    Raises:
        CorruptionError: its checksum is wrong, or it is of a kind that is not known.
    """
    (_, kind, _, level, epoch, sender, to, op, chunk, index, step, _, size, digest) = (
        _HEADER.unpack(header)
    )
    bare = header[:-_DIGEST_BYTES] + bytes(_DIGEST_BYTES)
    found = _digest(bare, body, payload)
    if found != digest:
        raise CorruptionError(
            f"a frame of operation {op}, chunk {chunk}, from node {sender} has checksum "
            f"{found:016x}, it was sent with {digest:016x}"
        )
    try:
        said = json.loads(body) if body else {}
        known = MessageType(kind)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"a frame from node {sender} makes no sense: {error}") from None
    if not isinstance(said, dict):
        raise CorruptionError(f"a frame from node {sender} has a body that is no mapping")
    return Message(known, epoch, sender, step, op, chunk, level, index, said, payload, size, to)


_DIGEST_BYTES = 8


def pack_arrays(arrays: Mapping[str, np.ndarray]) -> tuple[list[list[Any]], np.ndarray]:
    """Return what a body says of arrays, and their bytes one behind the other.

    Numbers of 64 bits travel in as few bytes as their values need: tokens in two instead of eight.
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
    """Return the same values in the smallest type of whole numbers that holds them all.

    Smaller ones are left: they may be a shard's whole state, which is not to be looked through.
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
        CorruptionError: the description does not fit the bytes.
    """
    arrays: dict[str, np.ndarray] = {}
    rest = np.zeros(0, np.uint8) if payload is None else payload
    if not isinstance(described, (list, tuple)):
        raise CorruptionError(f"arrays are described as {str(described)[:80]!r}")
    for entry in described:
        name, kind, sent, shape = _array_entry(entry)
        size = np.dtype(sent).itemsize * int(np.prod(shape, dtype=object))
        if size > rest.nbytes:
            raise CorruptionError(f"{name}: {size} bytes are described, {rest.nbytes} came")
        try:
            arrays[name] = rest[:size].copy().view(sent).astype(kind, copy=False).reshape(shape)
        except (ValueError, OverflowError) as error:  # such as more dimensions than there can be
            raise CorruptionError(f"{name}: it is described as {shape}: {error}") from None
        rest = rest[size:]
    if rest.nbytes:
        raise CorruptionError(f"{rest.nbytes} bytes came that are not described")
    return arrays


def _array_entry(entry: Any) -> tuple[str, str, str, list[int]]:
    try:
        name, kind, sent, shape = entry
    except (TypeError, ValueError):
        raise CorruptionError(f"an array is described as {str(entry)[:80]!r}") from None
    sizes = isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape)
    kinds = kind in _ARRAY_TYPES if sent == kind else all(k in _WHOLE_TYPES for k in (kind, sent))
    if not isinstance(name, str) or not kinds or not sizes:
        raise CorruptionError(f"an array is described as {str(entry)[:80]!r}")
    return name, kind, sent, shape


COORDINATOR = 0
