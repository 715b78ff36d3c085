"""The fabric between processes: authenticated connections, TLS between hosts, no pickle."""

from penstock.distributed.transport.connection import Connection
from penstock.distributed.transport.endpoint import Address, Endpoint, own_host
from penstock.distributed.transport.handshake import new_token

__all__ = ["Address", "Connection", "Endpoint", "new_token", "own_host"]
