"""Who may talk: both sides prove that they have the run's token before anything else is read.

A challenge and response over HMAC-SHA256 (RFC 2104), each side with a nonce of its own, so that
neither the token nor anything from which it could be found, or that could be sent again, crosses
the wire. Until a peer has proved itself, a fixed number of bytes is read from it and compared;
nothing is parsed. What follows is not encrypted: a run belongs on a network that nobody else
listens on (`docs/cluster.md`).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable

from penstock.errors import ClusterError

NONCE_BYTES = 32
PROOF_BYTES = 32
SECONDS = 5.0  # in which a peer must have proved itself
_GREETING = b"penstock-fabric2"
_PART_BYTES = 256 << 10  # of a payload, after which it counts as heard


def new_token() -> str:
    """Return a token for a run: 256 random bits, in hexadecimal."""
    return secrets.token_hex(32)


def accept(connection: socket.socket, token: str) -> None:
    """Let a peer that has connected prove itself, then prove oneself.

    Raises:
        ClusterError: it does not have the run's token, or is not a peer at all.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    deadline = time.monotonic() + SECONDS
    try:
        connection.settimeout(SECONDS)
        connection.sendall(_GREETING + nonce)
        answer = _read_by(connection, NONCE_BYTES + PROOF_BYTES, deadline)
        theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(token, b"connects", nonce, theirs)):
            raise ClusterError("it does not have this run's token")
        connection.sendall(_proof(token, b"accepts", theirs, nonce))
    except (OSError, EOFError) as error:
        raise ClusterError(f"it did not prove that it has the token: {error}") from None
    connection.settimeout(None)


def connect(connection: socket.socket, token: str) -> None:
    """Prove oneself to a peer, and let it prove itself.

    Raises:
        ClusterError: it does not have the run's token, or is not a peer at all.
    """
    deadline = time.monotonic() + SECONDS
    try:
        connection.settimeout(SECONDS)
        greeting = _read_by(connection, len(_GREETING) + NONCE_BYTES, deadline)
        if greeting[: len(_GREETING)] != _GREETING:
            raise ClusterError("what listens there is no node of a run")
        theirs, nonce = greeting[len(_GREETING) :], secrets.token_bytes(NONCE_BYTES)
        connection.sendall(nonce + _proof(token, b"connects", theirs, nonce))
        proof = _read_by(connection, PROOF_BYTES, deadline)
    except EOFError:
        raise ClusterError("it refused this node's token") from None
    except OSError as error:
        raise ClusterError(f"it did not answer: {error}") from None
    if not hmac.compare_digest(proof, _proof(token, b"accepts", nonce, theirs)):
        raise ClusterError("what listens there does not have this run's token")
    connection.settimeout(None)


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
