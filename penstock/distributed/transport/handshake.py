"""Authentication: both sides prove that they have the run's token before anything else is read.

The method is challenge and response over HMAC-SHA256 (RFC 2104), with a nonce from each side. The
token never crosses the wire, and an eavesdropper can neither compute the token nor replay a
response. Before a peer is authenticated, a fixed number of bytes is read from it and compared;
nothing is parsed.

Each side also says whether it sees the other on another host. If either does, TLS follows
(`certificates.py`). In TLS both sides prove the token again by their certificates, which excludes
an attacker who relayed the challenge and the response. Only authenticated peers reach TLS, so an
attacker without the token cannot make a node compute TLS handshakes.
"""

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
SECONDS = 5.0  # limit for the authentication, and again for the TLS handshake
_GREETING = b"penstock-fabric6"
REFUSAL = bytes(PROOF_BYTES)  # sent to a peer whose proof is wrong, before the connection is closed


def new_token() -> str:
    """Return a token for a run: 256 random bits, in hexadecimal."""
    return secrets.token_hex(32)


class ConnectionRejectedError(ClusterError):
    """The peer closed the connection before it answered, or was too slow; a retry may succeed."""


class Challenge:
    """A listener's challenge, and the check of the answer, which may arrive in parts.

    The listener sends `question` first.

    Args:
        token: the token of the run.
        wants_tls: whether this side sees the other on another host.
    """

    def __init__(self, token: str, *, wants_tls: bool) -> None:
        self._token, self._hello = token, _hello(wants_tls)
        self._answer = b""
        self.question = _GREETING + self._hello

    @property
    def missing_bytes(self) -> int:
        """How many bytes of the answer are missing; no more are read."""
        return HELLO_BYTES + PROOF_BYTES - len(self._answer)

    def take(self, part: bytes) -> None:
        """Append the next bytes of the answer."""
        self._answer += part

    @property
    def is_met(self) -> bool:
        """Whether the answer is complete and proves the token."""
        theirs, proof = self._answer[:HELLO_BYTES], self._answer[HELLO_BYTES:]
        return hmac.compare_digest(proof, _proof(self._token, b"connects", self._hello, theirs))

    @property
    def needs_tls(self) -> bool:
        """Whether TLS is to follow after a correct answer."""
        return _need_tls(self._hello, self._answer)

    @property
    def reply(self) -> bytes:
        """This side's own proof, sent after a correct answer."""
        theirs = self._answer[:HELLO_BYTES]
        return _proof(self._token, b"accepts", self._hello, theirs)


def connect(connection: socket.socket, credentials: Credentials) -> Stream:
    """Authenticate both ends of a connection; return the stream.

    Raises:
        ConnectionRejectedError: the peer closed the connection before it answered, or was too slow.
        ClusterError: the peer does not have the run's token, or is no node of a run.
    """
    token, deadline = credentials.token, time.monotonic() + SECONDS
    try:
        greeting = _read_by(connection, len(_GREETING) + HELLO_BYTES, deadline)
        if greeting[: len(_GREETING)] != _GREETING:
            raise ClusterError(
                "expected a process of a run; the listener is another program or another version "
                "of Penstock"
            )
        theirs = greeting[len(_GREETING) :]
        hello = _hello(not streams.is_within_host(connection))
        connection.sendall(hello + _proof(token, b"connects", theirs, hello))
        proof = _read_by(connection, PROOF_BYTES, deadline)
    except (EOFError, ConnectionError):
        raise ConnectionRejectedError(
            "the listener closed the connection before it replied: the run may be ending, or has "
            "too many pending connections"
        ) from None
    except TimeoutError:  # its process may have had no processor
        raise ConnectionRejectedError(f"the listener did not reply within {SECONDS:g} s") from None
    except OSError as error:
        raise ClusterError(f"the connection to the listener failed: {error}") from None
    if proof == REFUSAL:
        raise ClusterError("the listener refused the token; use the cluster.json of this run")
    if not hmac.compare_digest(proof, _proof(token, b"accepts", theirs, hello)):
        raise ClusterError("the listener does not have this run's token")
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
        raise ClusterError("the listener closed the connection during the TLS handshake") from None
    except OSError as error:
        raise ClusterError(f"no TLS handshake within {SECONDS:g} s: {error}") from None
    return stream


def _hello(wants_tls: bool) -> bytes:
    return bytes([wants_tls]) + secrets.token_bytes(NONCE_BYTES)


def _need_tls(*hellos: bytes) -> bool:
    """Whether either side wants TLS: one side cannot waive the demand of the other."""
    return any(hello[0] for hello in hellos)


def _read_by(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return the next `size` bytes, if all of them arrive before the deadline."""
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(received))
        if not part:
            raise EOFError("the connection was closed")
        received += part
    return received


def _proof(token: str, side: bytes, accepts: bytes, connects: bytes) -> bytes:
    """Return the proof of the token over the hellos of both sides."""
    signed = _GREETING + side + accepts + connects
    return hmac.new(token.encode(), signed, hashlib.sha256).digest()
