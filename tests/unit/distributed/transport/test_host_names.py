"""Host names that no resolver takes are refused in words."""

from __future__ import annotations

import pytest
from waiting import wait_until

from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.transport import Endpoint, new_token, own_host
from penstock.errors import ClusterError

NAMES = ["a..b", "x" * 70, "a\0b", "\ud800"]
EXPECTED = "expected a host name or an address"


@pytest.mark.parametrize("host", NAMES)
def test_route_to_impossible_host_is_refused(host):
    with pytest.raises(ClusterError, match=EXPECTED):
        own_host((host, 80))


@pytest.mark.parametrize("host", NAMES)
def test_listening_on_impossible_host_is_refused(host):
    with pytest.raises(ClusterError, match=EXPECTED):
        Endpoint(
            new_token(),
            host,
            on_connection_end=lambda connection, error: None,
            on_new_peer=lambda connection, message: None,
            on_failure=lambda error: None,
        )


def test_node_at_impossible_host_is_named_and_messages_to_it_are_dropped(endpoints, caplog):
    here = endpoints(new_token(), 1).endpoint

    def send() -> None:
        here.set_addresses({2: ("a..b", 80)}, 5)
        here.send(1, 2, Message(MessageType.WEIGHT_CREDIT, 5, 1))

    here.call(send)
    wait_until(lambda: caplog.messages and not here._opening)
    assert "node 1 cannot connect to node 2: a..b:80: " + EXPECTED in caplog.messages[0]
