"""What an engine and a shard have in common: epochs, and messages of any kind."""

from __future__ import annotations

import pytest
from any_message import messages
from hypothesis import given, settings, strategies as st
from lone_nodes import (
    begin,
    engine,
    shard,
    view,
)

from penstock.distributed.protocol.messages import Message, MessageType


@pytest.mark.parametrize("make", [engine, shard])
def test_view_of_earlier_epoch_is_ignored(make):
    node, context, _ = make()
    node.handle(view(3))
    node.handle(begin(epoch=3))
    context.sent.clear()
    node.handle(view(2))
    assert node.epoch == 3
    assert not context.sent
    node.handle(view(3))  # a repetition is answered
    assert context.kinds() == [MessageType.VIEW_ACK]
    context.do()
    assert not context.errors()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(messages([0, 1, 2, 100, 101, 102, 7]), max_size=8), st.sampled_from([engine, shard])
)
def test_random_messages_do_not_raise_in_nodes(received, make):
    node, context, _ = make()
    node.handle(begin())
    for message in received:
        node.handle(message)
        context.do(3)
    for _, message in context.sent:
        assert isinstance(message, Message)
