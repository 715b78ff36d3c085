"""The network between processes: authenticated connections, TLS between hosts, no pickle."""

from penstock.distributed.transport.certificates import Credentials
from penstock.distributed.transport.connection import Connection
from penstock.distributed.transport.endpoint import Address, Endpoint, own_host
from penstock.distributed.transport.handshake import connect, new_token
from penstock.distributed.transport.listener import ConnectionListener
from penstock.distributed.transport.shared_memory import LEAST_BYTES, SHM_BYTES
from penstock.distributed.transport.stream import Stream

__all__ = [
    "LEAST_BYTES",
    "SHM_BYTES",
    "Address",
    "Connection",
    "ConnectionListener",
    "Credentials",
    "Endpoint",
    "Stream",
    "connect",
    "new_token",
    "own_host",
    "stream",
]
