"""What tests of TLS between nodes share: other certificates, and a relay that sees all bytes."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import tempfile
import threading

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from recording_endpoints import RecordingEndpoint
from waiting import wait_until

from penstock.distributed.transport import certificates, handshake, new_token
from penstock.distributed.transport.certificates import tls_contexts

QUESTION_BYTES = 16 + handshake.HELLO_BYTES
ANSWER_BYTES = handshake.HELLO_BYTES + handshake.PROOF_BYTES
APPLICATION_DATA = 23  # the type of an encrypted record (RFC 8446, 5.1)


def receive(connection: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size:
        part = connection.recv(size - len(said))
        if not part:
            raise EOFError("the connection was closed")
        said += part
    return said


def refused_with(place: RecordingEndpoint, caplog) -> str:
    wait_until(lambda: place.endpoint.refused["127.0.0.1"])
    assert not place.node.messages
    return caplog.records[-1].message


def contexts_with(token: str, kind: str) -> certificates.TlsContexts:
    """Contexts whose peers are those of the run, and whose own certificate is not good."""
    good = tls_contexts(token)
    if kind == "of another run":
        bad = tls_contexts(new_token())
    elif kind == "expired":
        ended = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=1)
        bad = tls_contexts(token, not_after=ended.replace(tzinfo=None))
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        own = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "penstock run")])
        made = (
            x509.CertificateBuilder()
            .subject_name(own)
            .issuer_name(own)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(datetime.datetime(2020, 1, 1))
            .not_valid_after(datetime.datetime(2050, 1, 1))
            .sign(key, hashes.SHA256())
        )
        with tempfile.NamedTemporaryFile() as file:
            pem = serialization.Encoding.PEM
            form = serialization.PrivateFormat.PKCS8
            file.write(key.private_bytes(pem, form, serialization.NoEncryption()))
            file.write(made.public_bytes(pem))
            file.flush()
            for context in (good.server, good.client):
                context.load_cert_chain(file.name)
        return good
    for context in (bad.server, bad.client):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return bad


class Relay:
    """Passes bytes on between a node and the one it wants to reach, as a host on the way can.

    Args:
        there: where the second listens.
    """

    def __init__(self, there: tuple[str, int]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._there = there
        self.seen = bytearray()  # all that was passed on
        self.holds = threading.Event()  # whether records that come from the near end are kept
        self.held: list[bytes] = []
        self.failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._begin, daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        try:
            self.near, _ = self._listener.accept()
            self.far = socket.create_connection(self._there)
            self.prove()
            self.after()
        except (OSError, EOFError):
            return  # an end has closed
        except BaseException as error:
            self.failure.append(error)

    def prove(self) -> None:
        """Pass on the challenge and the response."""
        self._pass(self.far, self.near, QUESTION_BYTES)
        self._pass(self.near, self.far, ANSWER_BYTES)
        self._pass(self.far, self.near, handshake.PROOF_BYTES)

    def _pass(self, source: socket.socket, target: socket.socket, size: int) -> None:
        said = receive(source, size)
        self.seen += said
        target.sendall(said)

    def after(self) -> None:
        """Pass on records, both ways, until an end closes."""
        threading.Thread(target=self._back, daemon=True).start()
        while True:
            record = self.record(self.near)
            if self.holds.is_set():
                self.held.append(record)
            else:
                self.far.sendall(record)

    def _back(self) -> None:
        try:
            while True:
                self.near.sendall(self.record(self.far))
        except (OSError, EOFError):
            return

    def record(self, source: socket.socket) -> bytes:
        """Take the next record of TLS: type, version, length, and as many bytes."""
        header = receive(source, 5)
        record = header + receive(source, int.from_bytes(header[3:], "big"))
        self.seen += record
        return record

    def close(self) -> None:
        for each in (self.near, self.far):
            with contextlib.suppress(OSError):  # it wakes who reads from it
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._listener.close()
        self._thread.join(timeout=5)
