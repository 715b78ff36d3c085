"""Who may talk: both sides prove that they have the run's token before anything else is read.

A challenge and response over HMAC-SHA256 (RFC 2104), each side with a nonce of its own, so that
neither the token nor anything from which it could be found, or that could be sent again, crosses
the wire. Until a peer has proved itself, a fixed number of bytes is read from it and compared;
nothing is parsed.

Each side also says whether it sees the other on another host. If either does, TLS follows
(`certificates.py`), in which both prove the token again, by their certificates: whoever only passed
on the challenge and the response is left out. Strangers never get as far as TLS, so they cannot
make a node compute its handshakes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

from penstock.distributed.transport import stream as streams
from penstock.distributed.transport.certificates import Credentials
from penstock.distributed.transport.stream import PlainStream, Stream
from penstock.distributed.transport.tls import TlsStream
from penstock.errors import ClusterError

NONCE_BYTES = 32
HELLO_BYTES = 1 + NONCE_BYTES  # whether TLS is to follow, and a nonce
PROOF_BYTES = 32
SECONDS = 5.0  # in which a peer must have proved itself, and again for the handshake of TLS
_GREETING = b"penstock-fabric4"
REFUSAL = bytes(PROOF_BYTES)  # what one is told whose proof is wrong, before the end


def new_token() -> str:
    """Return a token for a run: 256 random bits, in hexadecimal."""
    return secrets.token_hex(32)


class ConnectionRejectedError(ClusterError):
    """The peer closed the connection before it answered: the next time it may have room."""


class Challenge:
    """What one who is connected to asks of the other, of whose answer any part may come at a time.

    `question` is to be sent first.

    Args:
        token: of the run.
        wants_tls: whether this side sees the other on another host.
    """

    def __init__(self, token: str, *, wants_tls: bool) -> None:
        self._token, self._hello = token, _hello(wants_tls)
        self._answer = b""
        self.question = _GREETING + self._hello

    @property
    def missing_bytes(self) -> int:
        """How many bytes of the answer are yet to come; more are not read."""
        return HELLO_BYTES + PROOF_BYTES - len(self._answer)

    def take(self, part: bytes) -> None:
        """Take the next bytes of the answer."""
        self._answer += part

    @property
    def is_met(self) -> bool:
        """Whether the whole answer has come, and is one that only the token makes."""
        theirs, proof = self._answer[:HELLO_BYTES], self._answer[HELLO_BYTES:]
        return hmac.compare_digest(proof, _proof(self._token, b"connects", self._hello, theirs))

    @property
    def needs_tls(self) -> bool:
        """Whether TLS is to follow, with one who has met it."""
        return _need_tls(self._hello, self._answer)

    @property
    def reply(self) -> bytes:
        """What is sent to one who has met it: this side's own proof."""
        theirs = self._answer[:HELLO_BYTES]
        return _proof(self._token, b"accepts", self._hello, theirs)


def connect(connection: socket.socket, credentials: Credentials) -> Stream:
    """Prove oneself to a peer, and let it prove itself; return the stream to it.

    Raises:
        ConnectionRejectedError: it closed the connection before it answered.
        ClusterError: it does not have the run's token, or is not a peer at all.
    """
    token, deadline = credentials.token, time.monotonic() + SECONDS
    try:
        greeting = _read_by(connection, len(_GREETING) + HELLO_BYTES, deadline)
        if greeting[: len(_GREETING)] != _GREETING:
            raise ClusterError(
                "what listens there is no node of a run, or of another version of Penstock"
            )
        theirs = greeting[len(_GREETING) :]
        hello = _hello(not streams.is_within_host(connection))
        connection.sendall(hello + _proof(token, b"connects", theirs, hello))
        proof = _read_by(connection, PROOF_BYTES, deadline)
    except (EOFError, ConnectionError):
        raise ConnectionRejectedError(
            "it closed the connection before it answered: the run may be ending, or others take "
            "up all pending connections"
        ) from None
    except OSError as error:
        raise ClusterError(f"it did not answer within {SECONDS:g} s: {error}") from None
    if proof == REFUSAL:
        raise ClusterError("it refused this node's token: is it that of this run?")
    if not hmac.compare_digest(proof, _proof(token, b"accepts", theirs, hello)):
        raise ClusterError("what listens there does not have this run's token")
    if _need_tls(theirs, hello):
        stream: Stream = _encrypted(connection, credentials)
    else:
        stream = PlainStream(connection)
    connection.settimeout(None)
    return stream


def _encrypted(connection: socket.socket, credentials: Credentials) -> TlsStream:
    stream = TlsStream(connection, credentials.tls.client, server_side=False)
    try:
        stream.handshake(time.monotonic() + SECONDS)
    except (EOFError, ConnectionError):
        raise ClusterError("it closed the connection during the handshake of TLS") from None
    except OSError as error:
        raise ClusterError(f"no handshake of TLS within {SECONDS:g} s: {error}") from None
    return stream


def _hello(wants_tls: bool) -> bytes:
    return bytes([wants_tls]) + secrets.token_bytes(NONCE_BYTES)


def _need_tls(*hellos: bytes) -> bool:
    """Whether either side wants it: so neither can be talked out of it."""
    return any(hello[0] for hello in hellos)


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


def _proof(token: str, side: bytes, accepts: bytes, connects: bytes) -> bytes:
    """Return what proves the token to who has the hellos of both sides."""
    said = _GREETING + side + accepts + connects
    return hmac.new(token.encode(), said, hashlib.sha256).digest()
