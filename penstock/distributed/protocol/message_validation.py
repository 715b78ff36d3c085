"""What a message must be before a node acts on it.

The checksum of whatever comes here was right, so that a message which names an operation, a chunk
or a number that cannot be is a defect, or comes from another version; it must not be able to harm
more than its step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.distributed.protocol.messages import Message
from penstock.distributed.protocol.transfer_schedule import (
    GRADIENT_WIDTH,
    Chunk,
    TransferOperation,
    TransferSchedule,
)
from penstock.errors import ProtocolError


def refuse(message: Message, what: str) -> ProtocolError:
    """Return the error of a message that cannot be."""
    return ProtocolError(
        f"node {message.sender} sent a {message.kind.name} message that {what}; do all nodes run "
        "the same version of Penstock with the same configuration?"
    )


def weights_of(transfers: TransferSchedule, message: Message) -> tuple[TransferOperation, Chunk]:
    """Return the operation and the piece of a chunk of weights."""
    operation = _operation(transfers, message)
    if message.chunk >= len(operation.weights):
        raise refuse(message, f"names chunk {message.chunk} of {len(operation.weights)}")
    piece = operation.weights[message.chunk]
    _require_size(message, piece.size)
    return operation, piece


def gradient_of(transfers: TransferSchedule, message: Message) -> tuple[TransferOperation, Chunk]:
    """Return the operation and the piece of a chunk of gradients."""
    operation = _operation(transfers, message)
    if message.chunk >= len(operation.gradients):
        raise refuse(message, f"names gradient {message.chunk} of {len(operation.gradients)}")
    piece = operation.gradients[message.chunk]
    if message.size:  # nothing stands for a gradient that does not exist
        _require_size(message, (piece.end - piece.begin) * GRADIENT_WIDTH)
    return operation, piece


def integer(message: Message, key: str, least: int, body: Mapping[str, Any] | None = None) -> int:
    """Return an integer of a message's body."""
    value = (message.body if body is None else body).get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refuse(message, f"says {str(value)[:40]!r} for {key!r}")
    return value


def real(message: Message, key: str) -> float:
    """Return a number of a message's body."""
    value = message.body.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refuse(message, f"says {str(value)[:40]!r} for {key!r}")
    return value


def hexadecimals(message: Message, key: str, count: int) -> list[float]:
    """Return so many floating-point numbers, spelled exactly, of a message's body."""
    values = message.body.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise refuse(message, f"has other than {count} numbers as {key!r}")
    try:
        return [float.fromhex(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        raise refuse(message, f"has other than numbers as {key!r}") from None


def _operation(transfers: TransferSchedule, message: Message) -> TransferOperation:
    if message.op >= len(transfers.operations):
        raise refuse(message, f"names operation {message.op} of {len(transfers.operations)}")
    return transfers.operations[message.op]


def _require_size(message: Message, size: int) -> None:
    held = message.size if message.payload is None else message.payload.nbytes
    if message.size != size or held != size:
        raise refuse(message, f"has {held} bytes for {size}")
