"""What only the two ends of a connection can put on a frame: where it comes in, and what it says.

A keyed BLAKE2b (RFC 7693) over the number of the frame in its direction, its header, its body and
a small payload. The keys come from the token and both nonces of the handshake, one for each
direction. So nobody between the two can make a frame, change what it says, send one again, leave
one out or change their order. Of a large payload only what the header says of it is sealed: its
size, its place, and a checksum (XXH3) that finds damage and proves nothing against who wants to
deceive. To seal it whole would take longer than to send it.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from penstock.errors import CorruptionError

SEAL_BYTES = 16
MOST_BYTES = 1 << 14  # of a payload that is sealed whole


@dataclass(frozen=True)
class Keys:
    """The secrets of one connection, as one of its ends has them."""

    sends: bytes
    takes: bytes


class Seals:
    """The seals of the frames in one direction, one after the other."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=SEAL_BYTES)
        self._number = 0

    def next(self, header: bytes, body: bytes, payload: memoryview | None) -> bytes:
        """Return the seal of the next frame."""
        state = self._keyed.copy()
        state.update(self._number.to_bytes(8, "little") + header)
        state.update(body)
        if payload is not None and payload.nbytes <= MOST_BYTES:
            state.update(payload)
        self._number += 1
        return state.digest()

    def check(self, seal: bytes, header: bytes, body: bytes, payload: memoryview | None) -> None:
        """Take the seal of the next frame that has come.

        Raises:
            CorruptionError: it is not the one that the other end has put on it.
        """
        number = self._number
        if not hmac.compare_digest(seal, self.next(header, body, payload)):
            raise CorruptionError(
                f"frame {number} of a connection has a wrong seal: it was damaged or changed on "
                "the way, or is not the one that was sent then"
            )
