"""What goes wrong with messages in a simulated network, decided by a seed.

Loss, repetition, delay (which also reorders), a flipped bit anywhere in the frame, and links that
are cut for a while. A flipped bit goes through the real packing and its checksum.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import CorruptionError
from penstock.fabric.messages import HEADER_BYTES, Message, lengths, pack, unpack

_Carried = list[tuple[float, Message | CorruptionError]]


@dataclass(frozen=True)
class Rates:
    """How probable each fault is, for each message."""

    lost: float = 0.0
    repeated: float = 0.0
    delayed: float = 0.0
    flipped: float = 0.0
    longest_delay: float = 0.5


class Faults:
    """Decides what becomes of each message.

    Args:
        seed: of all chance; equal seeds and equal messages, equal faults.
        rates: how probable they are.
        cuts: pairs of nodes whose link is cut, with begin and end in seconds.
        until: when messages are no longer lost, repeated, delayed or flipped.
    """

    def __init__(
        self,
        seed: int = 0,
        rates: Rates | None = None,
        cuts: Mapping[tuple[int, int], tuple[float, float]] | None = None,
        until: float = float("inf"),
    ) -> None:
        self._random = random.Random(seed)
        self._rates = rates or Rates()
        self._cuts = dict(cuts or {})
        self._until = until
        self.counts = dict.fromkeys(("lost", "cut", "repeated", "delayed", "flipped"), 0)

    def carry(self, now: float, sender: int, to: int, message: Message) -> _Carried:
        """Return what comes of a message: copies, each with how much later than it should."""
        begin, end = self._cuts.get((min(sender, to), max(sender, to)), (0.0, 0.0))
        if begin <= now < end:
            return self._count("cut", [])
        is_well = now >= self._until
        if not is_well and self._happens(self._rates.lost):
            return self._count("lost", [])
        # What comes is a copy, as over a wire: neither side sees the other's memory.
        copy = message
        if message.payload is not None:
            copy = replace(message, payload=message.payload.copy())
        if is_well:
            return [(0.0, copy)]
        if self._happens(self._rates.flipped):
            return self._count("flipped", [(0.0, self._flip(copy))])
        if self._happens(self._rates.repeated):
            again = copy
            if copy.payload is not None:
                again = replace(copy, payload=copy.payload.copy())
            late = self._random.uniform(0, self._rates.longest_delay)
            return self._count("repeated", [(0.0, copy), (late, again)])
        if self._happens(self._rates.delayed):
            late = self._random.uniform(0, self._rates.longest_delay)
            return self._count("delayed", [(late, copy)])
        return [(0.0, copy)]

    def _happens(self, rate: float) -> bool:
        return rate > 0 and self._random.random() < rate

    def _count(self, what: str, result: _Carried) -> _Carried:
        self.counts[what] += 1
        return result

    def _flip(self, message: Message) -> Message | CorruptionError:
        """Return what the receiver makes of the frame with one bit flipped."""
        header, body = pack(message)
        payload = b"" if message.payload is None else message.payload.tobytes()
        frame = bytearray(header + body + payload)
        bit = self._random.randrange(8 * len(frame))
        frame[bit // 8] ^= 1 << bit % 8
        try:
            head = bytes(frame[:HEADER_BYTES])
            body_bytes, payload_bytes = lengths(head)
            rest = frame[HEADER_BYTES:]
            if body_bytes + payload_bytes != len(rest):
                # A real receiver would read on into the next frame, and find its checksum wrong.
                return CorruptionError("a frame's length was damaged on the way")
            part = np.frombuffer(bytes(rest[body_bytes:]), np.uint8).copy()
            return unpack(head, bytes(rest[:body_bytes]), part if payload_bytes else None)
        except CorruptionError as error:
            return error
