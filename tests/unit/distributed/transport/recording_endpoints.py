"""Endpoints with one node each that record received messages and ended connections."""

from __future__ import annotations

import socket

from waiting import SECONDS

from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.transport import Endpoint


class RecordingNode:
    """A node that keeps its received messages."""

    progress = 0

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def handle(self, message: Message) -> None:
        self.messages.append(message)


class RecordingEndpoint:
    """An endpoint with one node; records messages of new peers, ended connections and errors."""

    def __init__(self, token: str, number: int) -> None:
        self.from_new_peers: list[Message] = []
        self.ended: list[Exception] = []
        self.failed: list[Exception] = []
        self.node = RecordingNode()
        self.endpoint = Endpoint(
            token,
            "127.0.0.1",
            on_connection_end=lambda connection, error: self.ended.append(error),
            on_new_peer=lambda connection, message: self.from_new_peers.append(message),
            on_failure=self.failed.append,
        )
        self.endpoint.add(number, self.node)
        self.endpoint.start()


def greet(from_: RecordingEndpoint, number: int, to: RecordingEndpoint):
    connection = from_.endpoint.connect(to.endpoint.address)
    connection.send(Message(MessageType.HELLO, 0, number, body={"node": number}))
    return connection


def raw(place: RecordingEndpoint) -> socket.socket:
    return socket.create_connection(place.endpoint.address, timeout=SECONDS)
