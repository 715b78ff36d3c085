"""The spans of a node in a message, and the time by the node's clock when it was sent."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

import numpy as np

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.messages import Message, MessageType, message_with
from penstock.errors import ProtocolError
from penstock.spans import Clock, Measured, Span


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


def measured_of(message: Message) -> Measured:
    """Return the spans and their number beyond the limit, as the sender measured them.

    **Raises:** `ProtocolError` if the message is malformed.
    """
    content = b"" if message.payload is None else message.payload.tobytes()
    try:
        found = json.loads(content)
    except ValueError as error:
        raise message_validation.refuse(message, f"has no list of spans: {error}") from None
    if not isinstance(found, list):
        raise message_validation.refuse(message, f"has {str(found)[:40]!r} as spans")
    spans = tuple(_span(message, each) for each in found)
    return Measured({}, spans, message_validation.integer(message, "dropped", 0))


def _span(message: Message, values: Any) -> Span:
    try:
        lane, what, begin, end, step, op, size = values
    except (TypeError, ValueError):
        raise _invalid(message, values) from None
    texts = isinstance(lane, str) and isinstance(what, str)
    times = all(type(time) in (int, float) for time in (begin, end))
    numbers = type(size) is int and all(n is None or type(n) is int for n in (step, op))
    if not (texts and times and numbers):
        raise _invalid(message, values)
    return Span(lane, what, begin, end, step, op, size)


def _invalid(message: Message, values: object) -> ProtocolError:
    return message_validation.refuse(message, f"has {str(values)[:80]!r} as a span")
