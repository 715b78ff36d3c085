"""The other end of the measured connections: a process of its own, forked as an engine is."""

import socket
import threading

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


def serve(address: tuple[str, int], token: str) -> None:
    """Connect to the measuring process, and serve it until a connection ends."""
    peer, credentials, ended = LinkPeer(), Credentials(token), threading.Event()

    def opened(way: str) -> Connection:
        stream = connect(socket.create_connection(address, timeout=_CONNECT_SECONDS), credentials)
        connection = Connection(stream, peer.take, lambda *_: ended.set(), lambda: way == WAYS[0])
        connection.start()
        return connection

    connections = [opened(way) for way in WAYS]
    ended.wait()
    for connection in connections:
        connection.close()
