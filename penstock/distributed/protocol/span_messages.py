"""The spans of a node in a message, and the time by the node's clock when it was sent."""

import json
from dataclasses import astuple
from typing import Any, TypeGuard

import numpy as np

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.messages import (
    COORDINATOR,
    Message,
    MessageType,
    message_with,
)
from penstock.errors import ProtocolError
from penstock.spans import Clock, Measured, Span

MOST_SPANS = 1 << 20
"""The most spans that a request may ask each part of a node to keep."""

_PARTS = 8  # of a node, with room: its jobs, and the lanes of its store
_SPAN_BYTES = 512  # of one span, with room for the name of a weight
_MOST_SECONDS = float(1 << 53)  # of a clock: sums of two are finite


def spans_message(request: Message, sender: int, clock: Clock, measured: Measured) -> Message:
    """Return the answer to a request for spans.

    Args:
        request: names the epoch and the request.
        sender: the node that answers.
        clock: of the spans.
        measured: what the node measured.
    """
    content = json.dumps([astuple(span) for span in measured.spans]).encode()
    return message_with(
        np.frombuffer(content, np.uint8),
        kind=MessageType.SPANS,
        epoch=request.epoch,
        sender=sender,
        op=request.op,
        body={"clock": clock(), "dropped": measured.dropped},
    )


def measured_of(message: Message, keep: int = MOST_SPANS) -> Measured:
    """Return the spans and their number beyond the limit, as the sender measured them.

    **Arguments:** `keep` is the number of spans that each part of the node was asked to keep.

    **Raises:** `ProtocolError` if the message is malformed, or larger than so many spans are.
    """
    content = b"" if message.payload is None else message.payload.tobytes()
    most = (1 + keep) * _PARTS * _SPAN_BYTES
    if len(content) > most:
        raise message_validation.refuse(
            message, f"has {len(content):,} bytes of spans, expected at most {most:,}"
        )
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise message_validation.refuse(message, f"has no list of spans: {error}") from None
    if not isinstance(found, list):
        raise message_validation.refuse(message, f"has {str(found)[:40]!r} as spans")
    spans = tuple(_span(message, each) for each in found)
    return Measured({}, spans, message_validation.integer(message, "dropped", 0))


def clock_of(message: Message) -> float:
    """Return the time by the sender's clock when it sent its spans.

    **Raises:** `ProtocolError` if the time is impossible.
    """
    clock = message.body.get("clock")
    if not _is_time(clock):
        raise message_validation.refuse(
            message, f"has {str(clock)[:40]!r} as 'clock', expected a finite number of seconds"
        )
    return float(clock)


def keep_of(request: Message) -> int:
    """Return the number of spans that a node is asked to keep.

    **Raises:** `ProtocolError` if the request is not the coordinator's, or malformed.
    """
    if request.sender != COORDINATOR:
        raise message_validation.refuse(
            request, f"asks for spans, which only the coordinator, node {COORDINATOR}, may do"
        )
    keep = message_validation.integer(request, "keep", 0)
    if keep > MOST_SPANS:
        raise message_validation.refuse(
            request, f"asks to keep {str(keep)[:40]} spans, expected at most {MOST_SPANS}"
        )
    return keep


def _is_time(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number of seconds: NaN compares as false."""
    return type(value) in (int, float) and -_MOST_SECONDS < value < _MOST_SECONDS


def _span(message: Message, values: Any) -> Span:
    try:
        lane, what, begin, end, step, op, size = values
    except (TypeError, ValueError):
        raise _invalid(message, values) from None
    texts = isinstance(lane, str) and isinstance(what, str)
    times = _is_time(begin) and _is_time(end)
    numbers = type(size) is int and all(n is None or type(n) is int for n in (step, op))
    if not (texts and times and numbers):
        raise _invalid(message, values)
    return Span(lane, what, float(begin), float(end), step, op, size)


def _invalid(message: Message, values: object) -> ProtocolError:
    return message_validation.refuse(message, f"has {str(values)[:80]!r} as a span")
