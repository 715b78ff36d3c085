"""The other end of the measured connections: a process of its own, as an engine is.

`python -m penstock.calibration.link_peer` reads the address and the token of the measuring process,
as JSON, from its standard input, and ends with its connections.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.distributed.protocol import CHUNK_BYTES, Message, MessageType, message_with
from penstock.distributed.transport import Connection, Credentials, connect

WAYS = ("shared memory", "socket")
"""The connections, in the order in which they are opened: how each carries its payloads."""

_CONNECT_SECONDS = 10.0


class LinkPeer:
    """Keeps what arrives, as an engine does; answers the last message, and sends as much as it is
    asked for."""

    def __init__(self) -> None:
        self._kept = np.zeros(CHUNK_BYTES, np.uint8)
        self._sent = np.ones(CHUNK_BYTES, np.uint8)

    def take(self, connection: Connection, message: Message) -> None:
        """Handle a message; called in the connection's reader thread."""
        if message.payload is not None:
            self._kept[: message.size] = message.payload
        if message.kind is MessageType.BEGIN:
            for _ in range(message.body["pieces"]):
                payload = self._sent[: message.body["bytes"]]
                connection.send(message_with(payload, kind=MessageType.GRADIENT, epoch=0, sender=1))
        elif message.kind is MessageType.HEARTBEAT:
            connection.send(Message(MessageType.HEARTBEAT, 0, 1, step=message.step))


def main() -> None:
    """Connect as the standard input says, and serve until a connection ends."""
    given: Mapping[str, Any] = json.load(sys.stdin)
    ended = threading.Event()
    peer, credentials = LinkPeer(), Credentials(given["token"])
    host, port = given["address"]

    def opened(way: str) -> Connection:
        stream = connect(
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS), credentials
        )
        return Connection(stream, peer.take, lambda *_: ended.set(), lambda: way == WAYS[0])

    connections = [opened(way) for way in WAYS]
    ended.wait()
    for connection in connections:
        connection.close()


if __name__ == "__main__":
    main()
