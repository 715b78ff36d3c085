"""Endpoints with one node each, and what comes to them."""

from __future__ import annotations

import socket

from waiting import SECONDS

from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.transport import Endpoint


class Heard:
    """A node that keeps what comes to it."""

    progress = 0

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def handle(self, message: Message) -> None:
        self.messages.append(message)


class Place:
    """An endpoint with one node, and what it was told."""

    def __init__(self, token: str, number: int) -> None:
        self.strangers: list[Message] = []
        self.ended: list[Exception] = []
        self.failed: list[Exception] = []
        self.node = Heard()
        self.endpoint = Endpoint(
            token,
            "127.0.0.1",
            on_connection_end=lambda connection, error: self.ended.append(error),
            on_new_peer=lambda connection, message: self.strangers.append(message),
            on_failure=self.failed.append,
        )
        self.endpoint.add(number, self.node)
        self.endpoint.start()


def greet(from_: Place, number: int, to: Place):
    connection = from_.endpoint.connect(to.endpoint.address)
    connection.send(Message(MessageType.HELLO, 0, number, body={"node": number}))
    return connection


def raw(place: Place) -> socket.socket:
    return socket.create_connection(place.endpoint.address, timeout=SECONDS)
