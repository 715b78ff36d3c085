"""The fabric between processes: authenticated connections, TLS between hosts, no pickle."""

from penstock.fabric.sockets.endpoint import Address, Endpoint, own_host
from penstock.fabric.sockets.handshake import new_token
from penstock.fabric.sockets.link import Link

__all__ = ["Address", "Endpoint", "Link", "new_token", "own_host"]
