"""Checks that a node makes before it acts on a message.

The checksum of every message here was right. So a message with an impossible operation, chunk or
number is a defect, or comes from another version. Such a message may harm no more than its step.
"""

from collections.abc import Mapping
from typing import Any

from penstock.distributed.protocol.messages import Message
from penstock.distributed.protocol.transfer_schedule import (
    GRADIENT_WIDTH,
    Chunk,
    SparseChunk,
    TransferOperation,
    TransferSchedule,
)
from penstock.errors import ProtocolError


def refuse(message: Message, what: str) -> ProtocolError:
    """Return the error for an invalid message."""
    return ProtocolError(
        f"node {message.sender} sent a {message.kind.name} message that {what}; do all nodes run "
        "the same version of Penstock with the same configuration?"
    )


def weights_of(transfers: TransferSchedule, message: Message) -> tuple[TransferOperation, Chunk]:
    """Return the operation of a chunk of weights, and the chunk."""
    operation = _operation(transfers, message)
    if message.chunk >= len(operation.weights):
        raise refuse(message, f"names chunk {message.chunk} of {len(operation.weights)}")
    piece = operation.weights[message.chunk]
    if isinstance(piece, SparseChunk):
        _require_at_most(message, piece.size)
    else:
        _require_size(message, piece.size)
    return operation, piece


def gradient_of(transfers: TransferSchedule, message: Message) -> tuple[TransferOperation, Chunk]:
    """Return the operation of a chunk of gradients, and the chunk."""
    operation = _operation(transfers, message)
    if message.chunk >= len(operation.gradients):
        raise refuse(message, f"names gradient {message.chunk} of {len(operation.gradients)}")
    piece = operation.gradients[message.chunk]
    size = (piece.end - piece.begin) * GRADIENT_WIDTH
    if isinstance(piece, SparseChunk):
        _require_at_most(message, size)
        if message.size % GRADIENT_WIDTH:
            raise refuse(message, f"has {message.size} bytes, expected a multiple of 4")
    elif message.size:  # size 0 means that the gradient does not exist
        _require_size(message, size)
    return operation, piece


def integer(message: Message, key: str, least: int, body: Mapping[str, Any] | None = None) -> int:
    """Return an integer in a message's body, at least `least`."""
    value = (message.body if body is None else body).get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refuse(
            message, f"has {str(value)[:40]!r} as {key!r}, expected an integer of at least {least}"
        )
    return value


def real(message: Message, key: str) -> float:
    """Return a number in a message's body."""
    value = message.body.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refuse(message, f"has {str(value)[:40]!r} as {key!r}, expected a number")
    return value


def hexadecimals(message: Message, key: str, count: int) -> list[float]:
    """Return `count` floating-point numbers in a message's body, written as exact hexadecimals."""
    values = message.body.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise refuse(message, f"has {str(values)[:40]!r} as {key!r}, expected {count} numbers")
    try:
        return [float.fromhex(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        raise refuse(
            message, f"has {str(values)[:40]!r} as {key!r}, expected hexadecimal numbers"
        ) from None


def _operation(transfers: TransferSchedule, message: Message) -> TransferOperation:
    if message.op >= len(transfers.operations):
        raise refuse(message, f"names operation {message.op} of {len(transfers.operations)}")
    return transfers.operations[message.op]


def _require_at_most(message: Message, size: int) -> None:
    held = message.size if message.payload is None else message.payload.nbytes
    if message.size != held or held > size:
        raise refuse(message, f"has {held} bytes, expected {message.size} and at most {size}")


def _require_size(message: Message, size: int) -> None:
    held = message.size if message.payload is None else message.payload.nbytes
    if message.size != size or held != size:
        raise refuse(message, f"has {held} bytes, expected {size}")
