"""TLS 1.3 between the processes of one run: a valid certificate proves the run's token.

The token determines the private key of the run's certificate authority, so every process of the run
can compute that key and no other process can. Each process makes its own key pair, signs a
certificate for it as this authority, and accepts only certificates that the authority has signed. A
valid certificate therefore proves that its owner has the token. The keys that encrypt a connection
come from an ephemeral key exchange: an attacker who learns the token later cannot decrypt recorded
connections.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import secrets
import ssl
import tempfile
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ClusterError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

# The order of the group of P-256 (FIPS 186-5, SP 800-186).
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# The token ends with the run, so certificates need no end of their own, and the clocks of two hosts
# need not agree. RFC 5280, 4.1.2.5, defines this end for such certificates.
_NOT_BEFORE = datetime.datetime(1970, 1, 1)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59)


@dataclass(frozen=True)
class TlsContexts:
    """A process's contexts for the connections that it accepts, and for those that it opens."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class Credentials:
    """The run's token and the TLS contexts made from it.

    Args:
        token: the token of the run.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self._lock = threading.Lock()
        self._contexts: TlsContexts | None = None

    @property
    def tls(self) -> TlsContexts:
        """The TLS contexts with this process's certificate, made at the first use."""
        with self._lock:
            if self._contexts is None:
                self._contexts = tls_contexts(self.token)
            return self._contexts


def tls_contexts(token: str, not_after: datetime.datetime = _NOT_AFTER) -> TlsContexts:
    """Make a key and a certificate; return contexts that prove and require the run's token.

    Raises:
        ClusterError: the temporary folder cannot be written.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    authority_key = ec.derive_private_key(_authority_secret(token), ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _authority_certificate(authority_key)
    certificate = _certificate(key, authority_key, not_after)
    return TlsContexts(
        server=_context(ssl.PROTOCOL_TLS_SERVER, authority, certificate, key),
        client=_context(ssl.PROTOCOL_TLS_CLIENT, authority, certificate, key),
    )


def _authority_secret(token: str) -> int:
    """Return the authority's private key, from 512 bits: the bias of the modulus is negligible."""
    digest = hmac.new(token.encode(), b"penstock certificate authority", hashlib.sha512).digest()
    return int.from_bytes(digest, "big") % (_P256_ORDER - 1) + 1


def _authority_certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    builder = _builder(_AUTHORITY, key.public_key(), key.public_key(), _NOT_AFTER)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return builder.sign(key, hashes.SHA256())


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    authority_key: ec.EllipticCurvePrivateKey,
    not_after: datetime.datetime,
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    builder = _builder(_PROCESS, key.public_key(), authority_key.public_key(), not_after)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return builder.sign(authority_key, hashes.SHA256())


_AUTHORITY, _PROCESS = "penstock run", "penstock process"  # the subjects of certificates


def _builder(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    authority_key: ec.EllipticCurvePublicKey,
    not_after: datetime.datetime,
) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    own = x509.SubjectKeyIdentifier.from_public_key(key)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key)
    return (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(_AUTHORITY))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(not_after)
        .add_extension(own, critical=False)
        .add_extension(issuer, critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _context(
    protocol: int,
    authority: x509.Certificate,
    certificate: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
) -> ssl.SSLContext:
    from cryptography.hazmat.primitives import serialization

    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate proves the token, not the host
    context.verify_mode = ssl.CERT_REQUIRED  # of servers and of clients
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # every connection verifies the certificates again
    pem = serialization.Encoding.PEM
    context.load_verify_locations(cadata=authority.public_bytes(pem).decode())
    # `ssl` reads keys from files only. The file's key is encrypted with a password that never
    # leaves this function.
    password = secrets.token_bytes(32)
    encryption = serialization.BestAvailableEncryption(password)
    own = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption)
    try:
        with tempfile.NamedTemporaryFile(prefix="penstock-") as file:  # mode 0600
            file.write(own + certificate.public_bytes(pem))
            file.flush()
            context.load_cert_chain(file.name, password=password)
    except OSError as error:
        raise ClusterError(
            "connections to other hosts need TLS, whose certificate is written to the temporary "
            f"folder: {error}; free some kilobytes there, or set TMPDIR to another folder"
        ) from None
    return context
