"""The network between processes: authenticated connections, TLS between hosts, no pickle."""

from penstock.distributed.transport import stream as stream
from penstock.distributed.transport.certificates import Credentials as Credentials
from penstock.distributed.transport.connection import Connection as Connection
from penstock.distributed.transport.endpoint import (
    Address as Address,
    Endpoint as Endpoint,
    own_host as own_host,
)
from penstock.distributed.transport.handshake import connect as connect, new_token as new_token
from penstock.distributed.transport.listener import ConnectionListener as ConnectionListener
from penstock.distributed.transport.shared_memory import (
    LEAST_BYTES as LEAST_BYTES,
    SHM_BYTES as SHM_BYTES,
)
from penstock.distributed.transport.stream import Stream as Stream
