"""Calls between processes: several pieces, damaged ones, and nodes that are lost."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.rpc import rpc as calls
from penstock.distributed.rpc.rpc import (
    FrameAssembler,
    InvalidResponseError,
    RpcClient,
    RpcMessage,
    ShardLostError,
    error_class,
    frames,
)
from penstock.distributed.worker.node_adapters import WorkerShard
from penstock.errors import ClusterError, CorruptionError, StorageError

PIECE = 1000


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(calls, "PIECE_BYTES", PIECE)


def any_size(number: int) -> int:
    return 2**70


def said(elements: int) -> RpcMessage:
    values = np.random.default_rng(elements).standard_normal(elements).astype(np.float32)
    return RpcMessage({"method": "write", "with": {"begin": 3}}, {"values": values})


@pytest.mark.parametrize("elements", [0, 1, 249, 250, 251, 1000])
def test_content_is_assembled_from_any_number_of_frames(elements):
    sent = said(elements)
    messages = list(frames(MessageType.RPC_REQUEST, 0, 7, sent))
    assert len(messages) == 1 + -(-4 * elements // PIECE)  # the first says what comes
    assert all(message.size <= PIECE for message in messages)
    gathered = FrameAssembler(lambda number: 4 * elements)
    assert [gathered.take(message) for message in messages[:-1]] == [None] * (len(messages) - 1)
    whole = gathered.take(messages[-1])
    assert whole is not None
    number, came = whole
    assert (number, came.body) == (7, sent.body)
    np.testing.assert_array_equal(came.arrays["values"], sent.arrays["values"])


def test_consecutive_calls_are_separated():
    gathered = FrameAssembler(any_size)
    came = []
    for number, elements in enumerate((600, 0, 300)):
        for message in frames(MessageType.RPC_REPLY, 5, number, said(elements)):
            came.append(gathered.take(message))
    whole = [each for each in came if each is not None]
    assert [(number, found.arrays["values"].size) for number, found in whole] == [
        (0, 600),
        (1, 0),
        (2, 300),
    ]


@pytest.mark.parametrize(
    "body",
    [{}, {"bytes": -1}, {"bytes": "1000"}, {"bytes": 10**15}, {"bytes": 3 * PIECE}],
)
def test_invalid_first_frame_is_refused_before_allocation(body):
    with pytest.raises(CorruptionError, match="RPC_REQUEST announces"):
        FrameAssembler(any_size).take(
            Message(MessageType.RPC_REQUEST, 0, 0, op=1, index=2, body=body)
        )


@pytest.mark.parametrize("size", [2401, 10**12, 2**60])
def test_oversized_call_is_refused_before_allocation_and_next_is_read(size):
    gathered = FrameAssembler(lambda number: 2400)
    announced = {"bytes": size, "says": {}, "arrays": []}
    told = rf"announces {size:,} bytes, expected at most 2,400"
    with pytest.raises(CorruptionError, match=told):
        gathered.take(
            Message(MessageType.RPC_REPLY, 0, 3, op=1, index=-(-size // PIECE), body=announced)
        )
    _, *pieces = frames(MessageType.RPC_REPLY, 3, 1, said(600))
    assert [gathered.take(piece) for piece in pieces] == [None] * len(pieces)
    *before, last = (
        gathered.take(message) for message in frames(MessageType.RPC_REPLY, 3, 2, said(600))
    )
    assert before == [None] * len(before)
    assert last[0] == 2


def _of_another_call(message: Message) -> Message:
    return replace(message, op=message.op + 1)


def _too_long(message: Message) -> Message:
    payload = np.zeros(20 * PIECE, np.uint8)
    return replace(message, payload=payload, size=payload.nbytes)


def _empty(message: Message) -> Message:
    return replace(message, payload=None, size=0)


@pytest.mark.parametrize("damage", [_of_another_call, _too_long, _empty])
def test_mismatched_frames_are_refused(damage):
    first, second, *_ = frames(MessageType.RPC_REQUEST, 0, 1, said(600))
    gathered = FrameAssembler(any_size)
    assert gathered.take(first) is None
    with pytest.raises(CorruptionError, match="do not match its first frame"):
        gathered.take(damage(second))


@pytest.mark.parametrize(
    "described",
    [
        ["values", "object", "object", [600]],
        ["values", "float32", "float32", [10**9]],
        ["values", "float32", "float32", [-600]],
        ["values", "float32", "float32", [599]],
        ["values"],
        None,
    ],
)
def test_arrays_unlike_their_description_are_refused(described):
    first, *pieces, last = frames(MessageType.RPC_REQUEST, 0, 1, said(600))
    gathered = FrameAssembler(any_size)
    gathered.take(replace(first, body={**first.body, "arrays": [described]}))
    for piece in pieces:
        gathered.take(piece)
    with pytest.raises(CorruptionError, match=r"array|values: expected"):
        gathered.take(last)


class Pair:
    """Calls, and a node that answers what a function says, in a thread of its own."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.failed: Exception | None = None
        self.sent: list[Message] = []
        self.gathered = FrameAssembler(any_size)
        self.calls = RpcClient(self.send, self.broken)

    def broken(self) -> None:
        if self.failed is not None:
            raise self.failed

    def send(self, node: int, message: Message) -> None:
        self.sent.append(message)
        whole = self.gathered.take(message)
        if whole is None:
            return
        number, asked = whole

        def reply() -> None:
            for frame in self.answer(node, number, asked):
                self.calls.take(frame)

        threading.Thread(target=reply).start()


def test_response_returns_with_arrays():
    def twice(node, number, asked):
        values = {"values": 2 * asked.arrays["values"]}
        return frames(MessageType.RPC_REPLY, node, number, RpcMessage({"step": 4}, values))

    sent = said(777)
    answer = Pair(twice).calls.ask(3, "read", {}, sent.arrays, most=4 * 777)
    assert answer.body["step"] == 4
    np.testing.assert_array_equal(answer.arrays["values"], 2 * sent.arrays["values"])


def test_oversized_response_is_error_of_caller():
    def boast(node, number, asked):
        body = {"says": {}, "arrays": [], "bytes": 2**60}
        return [
            Message(
                MessageType.RPC_REPLY, 0, node, op=number, index=-(-(2**60) // PIECE), body=body
            )
        ]

    with pytest.raises(
        InvalidResponseError, match=r"node 3 announces 1,152,921,504,606,846,976 bytes"
    ):
        Pair(boast).calls.ask(3, "read", {}, {}, most=4000)


def test_oversized_request_gets_error_and_next_is_served():
    sent: list[Message] = []
    context = SimpleNamespace(
        send=lambda to, message: sent.append(message),
        work=lambda job: job.then(job.run()),
    )
    endpoint = SimpleNamespace(context=lambda number: context)
    place = SimpleNamespace(most_bytes=4000, store=SimpleNamespace(step=7))
    member = WorkerShard(SimpleNamespace(number=3), endpoint, place)
    body = {"says": {}, "arrays": [], "bytes": 2**60}
    member.handle(
        Message(MessageType.RPC_REQUEST, 0, 0, op=1, index=-(-(2**60) // PIECE), body=body)
    )
    (refused,) = sent
    assert refused.op == 1
    assert refused.body["says"]["error"] == "CorruptionError"
    text = refused.body["says"]["text"]
    assert "announces 1,152,921,504,606,846,976 bytes, expected at most 4,000" in text
    for message in frames(
        MessageType.RPC_REQUEST, 0, 2, RpcMessage({"method": "nothing of this kind"})
    ):
        member.handle(message)
    assert sent[-1].op == 2
    assert sent[-1].body["says"]["error"] == "ClusterError"


def test_calls_may_be_concurrent():
    def say_where(node, number, asked):
        return frames(MessageType.RPC_REPLY, node, number, RpcMessage({"node": node}))

    calls = Pair(say_where).calls
    asked = [calls.begin(node, "flush", {}, {}) for node in (3, 4, 5)]
    assert [each.answer().body["node"] for each in reversed(asked)] == [5, 4, 3]


@pytest.mark.parametrize("is_valid", [True, False])
def test_response_to_call_of_another_node_is_ignored(is_valid):
    """Node 4 must neither answer for node 3, nor cost it its place by a damaged response."""
    calls = RpcClient(lambda node, message: None, lambda: None)
    asked = calls.begin(3, "flush", {}, {})
    (reply,) = frames(MessageType.RPC_REPLY, 4, 1, RpcMessage({"node": 4}))
    calls.take(reply if is_valid else replace(reply, body={}))
    calls.take(next(frames(MessageType.RPC_REPLY, 3, 1, RpcMessage({"node": 3}))))
    assert asked.answer().body["node"] == 3


def test_remote_error_keeps_its_class():
    def refuse(node, number, asked):
        text = {"error": "CorruptionError", "text": "the slot is damaged"}
        return frames(MessageType.RPC_REPLY, node, number, RpcMessage(text))

    with pytest.raises(CorruptionError, match="the slot is damaged"):
        Pair(refuse).calls.ask(3, "read", {}, {})


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "os", "", "PenstockErro"])
def test_only_own_error_classes_can_be_named(name):
    assert error_class(name) is ClusterError


def test_pending_and_later_calls_of_lost_node_fail():
    pair = Pair(lambda node, number, asked: ())
    threading.Timer(0.05, lambda: pair.calls.lost(3, "its host burned")).start()
    with pytest.raises(ShardLostError, match="its host burned"):
        pair.calls.ask(3, "flush", {}, {})
    sent = len(pair.sent)
    with pytest.raises(ShardLostError, match="its host burned"):
        pair.calls.ask(3, "flush", {}, {})
    assert len(pair.sent) == sent


def test_pending_call_fails_when_run_is_over():
    pair = Pair(lambda node, number, asked: ())
    pair.failed = StorageError("the run is over")
    with pytest.raises(StorageError, match="the run is over"):
        pair.calls.ask(3, "flush", {}, {})
