"""Who may talk: both sides prove that they have the run's token before anything else is read.

A challenge and response over HMAC-SHA256 (RFC 2104), each side with a nonce of its own, so that
neither the token nor anything from which it could be found, or that could be sent again, crosses
the wire. Until a peer has proved itself, a fixed number of bytes is read from it and compared;
nothing is parsed. The same three give the keys with which the frames that follow are sealed
(`seal.py`). They are not encrypted: `docs/cluster.md` says what that leaves.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable

from penstock.errors import ClusterError
from penstock.fabric.sockets.seal import Keys

NONCE_BYTES = 32
PROOF_BYTES = 32
SECONDS = 5.0  # in which a peer must have proved itself
_GREETING = b"penstock-fabric3"
REFUSAL = bytes(PROOF_BYTES)  # what one is told whose proof is wrong, before the end
_PART_BYTES = 256 << 10  # of a payload, after which it counts as heard


def new_token() -> str:
    """Return a token for a run: 256 random bits, in hexadecimal."""
    return secrets.token_hex(32)


class TurnedAwayError(ClusterError):
    """The peer closed the connection before it answered: the next time it may have room."""


class Challenge:
    """What one who is connected to asks of the other, of whose answer any part may come at a time.

    `question` is to be sent first.
    """

    def __init__(self, token: str) -> None:
        self._token, self._nonce = token, secrets.token_bytes(NONCE_BYTES)
        self._answer = b""
        self.question = _GREETING + self._nonce

    @property
    def missing_bytes(self) -> int:
        """How many bytes of the answer are yet to come; more are not read."""
        return NONCE_BYTES + PROOF_BYTES - len(self._answer)

    def take(self, part: bytes) -> None:
        """Take the next bytes of the answer."""
        self._answer += part

    @property
    def is_met(self) -> bool:
        """Whether the whole answer has come, and is one that only the token makes."""
        theirs, proof = self._answer[:NONCE_BYTES], self._answer[NONCE_BYTES:]
        return hmac.compare_digest(proof, _proof(self._token, b"connects", self._nonce, theirs))

    @property
    def reply(self) -> bytes:
        """What is sent to one who has met it: this side's own proof."""
        return _proof(self._token, b"accepts", self._answer[:NONCE_BYTES], self._nonce)

    @property
    def keys(self) -> Keys:
        """The keys of the connection to one who has met it."""
        theirs = self._answer[:NONCE_BYTES]
        return Keys(
            sends=_proof(self._token, b"seals of who accepts", self._nonce, theirs),
            takes=_proof(self._token, b"seals of who connects", self._nonce, theirs),
        )


def connect(connection: socket.socket, token: str) -> Keys:
    """Prove oneself to a peer, and let it prove itself; return the keys of the connection.

    Raises:
        TurnedAwayError: it closed the connection before it answered.
        ClusterError: it does not have the run's token, or is not a peer at all.
    """
    deadline = time.monotonic() + SECONDS
    try:
        connection.settimeout(SECONDS)
        greeting = _read_by(connection, len(_GREETING) + NONCE_BYTES, deadline)
        if greeting[: len(_GREETING)] != _GREETING:
            raise ClusterError(
                "what listens there is no node of a run, or of another version of Penstock"
            )
        theirs, nonce = greeting[len(_GREETING) :], secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce + _proof(token, b"connects", theirs, nonce))
        proof = _read_by(connection, PROOF_BYTES, deadline)
    except (EOFError, ConnectionError):
        raise TurnedAwayError(
            "it closed the connection before it answered: the run may be ending, or others take "
            "up all places at its door"
        ) from None
    except OSError as error:
        raise ClusterError(f"it did not answer within {SECONDS:g} s: {error}") from None
    if proof == REFUSAL:
        raise ClusterError("it refused this node's token: is it that of this run?")
    if not hmac.compare_digest(proof, _proof(token, b"accepts", nonce, theirs)):
        raise ClusterError("what listens there does not have this run's token")
    connection.settimeout(None)
    return Keys(
        sends=_proof(token, b"seals of who connects", theirs, nonce),
        takes=_proof(token, b"seals of who accepts", theirs, nonce),
    )


def _read_by(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return the next `size` bytes, if all of them come before the deadline."""
    said = b""
    while len(said) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(said))
        if not part:
            raise EOFError("the connection was closed")
        said += part
    return said


def _proof(token: str, side: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(token.encode(), _GREETING + side + first + second, hashlib.sha256).digest()


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes.

    **Raises:** `EOFError` if the peer closes before.
    """
    buffer = bytearray(size)
    read_into(connection, memoryview(buffer))
    return bytes(buffer)


def read_into(
    connection: socket.socket, buffer: memoryview, came: Callable[[], None] = lambda: None
) -> None:
    """Fill a buffer with what comes next; `came` is called for every part of it.

    **Raises:** `EOFError` if the peer closes before.
    """
    while buffer.nbytes:
        # A large part at once: every call that brings less is one more to wake up for.
        got = connection.recv_into(buffer[:_PART_BYTES], 0, socket.MSG_WAITALL)
        if got == 0:
            raise EOFError("the connection was closed")
        came()
        buffer = buffer[got:]
