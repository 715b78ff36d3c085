"""The fabric between processes: authenticated connections, TLS between hosts, no pickle."""

from penstock.distributed.transport.connection import Link
from penstock.distributed.transport.endpoint import Address, Endpoint, own_host
from penstock.distributed.transport.handshake import new_token

__all__ = ["Address", "Endpoint", "Link", "new_token", "own_host"]
