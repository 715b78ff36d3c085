"""The faults of messages in a simulated network, chosen by a seed.

The faults are loss, repetition, delay (which also reorders), one flipped bit anywhere in the frame,
and connections that are cut for a while. A frame with a flipped bit goes through the real packing
and its checksum.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.distributed.protocol import HEADER_BYTES, Message, lengths, pack, unpack
from penstock.errors import CorruptionError

_FATES = ("lost", "repeated", "delayed", "flipped")
_Carried = list[tuple[float, Message | CorruptionError]]


@dataclass(frozen=True)
class Rates:
    """The probability of each fault per message, and the longest delay in seconds."""

    lost: float = 0.0
    repeated: float = 0.0
    delayed: float = 0.0
    flipped: float = 0.0
    longest_delay: float = 0.5


class Faults:
    """Chooses the fault of each message.

    Args:
        seed: of all random choices; equal seeds and equal messages give equal faults.
        rates: the probabilities of the faults.
        cuts: pairs of nodes whose connection is cut, with begin and end in seconds.
        until: the time after which messages are no longer lost, repeated, delayed or flipped.
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
        chances = [(kind, getattr(self._rates, kind)) for kind in _FATES]
        self._chances = [(kind, rate) for kind, rate in chances if rate]
        self._cuts = dict(cuts or {})
        self._until = until
        self.counts = dict.fromkeys((*_FATES, "cut"), 0)

    def carry(self, now: float, sender: int, to: int, message: Message) -> _Carried:
        """Return the delivered copies of a message, each with its delay in seconds."""
        if self._cuts:
            begin, end = self._cuts.get((min(sender, to), max(sender, to)), (0.0, 0.0))
            if begin <= now < end:
                return self._count("cut", [])
        fate = self._fate() if self._chances and now < self._until else "well"
        if fate == "well":
            return [(0.0, message)]
        if fate == "lost":
            return self._count(fate, [])
        if fate == "flipped":
            return self._count(fate, [(0.0, self._flip(message))])
        late = self._random.uniform(0, self._rates.longest_delay)
        if fate == "repeated":
            return self._count(fate, [(0.0, message), (late, message)])
        return self._count(fate, [(late, message)])

    def _fate(self) -> str:
        """Return the fault of the next message."""
        left = self._random.random()
        for fate, rate in self._chances:
            left -= rate
            if left < 0:
                return fate
        return "well"

    def _count(self, what: str, result: _Carried) -> _Carried:
        self.counts[what] += 1
        return result

    def _flip(self, message: Message) -> Message | CorruptionError:
        """Return the receiver's result for the frame with one bit flipped."""
        header, body = pack(message)
        payload = b"" if message.payload is None else message.payload.tobytes()
        frame = bytearray(header + body + payload)
        bit = self._random.randrange(8 * len(frame))
        frame[bit // 8] ^= 1 << bit % 8
        try:
            head = bytes(frame[:HEADER_BYTES])
            body_bytes, payload_bytes = lengths(head)
            rest = frame[HEADER_BYTES:]
            assert body_bytes + payload_bytes == len(rest), "the header has a checksum of its own"
            part = np.frombuffer(bytes(rest[body_bytes:]), np.uint8).copy()
            return unpack(head, bytes(rest[:body_bytes]), part if payload_bytes else None)
        except CorruptionError as error:
            return error
