"""Messages between two processes: what a sample moves, by which way, and what is left behind."""

from __future__ import annotations

import os
import signal

import pytest

from penstock.calibration import link_cases, link_peer
from penstock.calibration.link_cases import BOTH, MESSAGE, ProcessLinks, process_links
from penstock.distributed.transport import Connection
from penstock.errors import ClusterError

PIECE, SAMPLE = 128 << 10, 1 << 20


@pytest.fixture(scope="module")
def links():
    """One process serves all tests: it takes seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_cases, "MESSAGE_BYTES", (PIECE // 2, PIECE))
        patch.setattr(link_cases, "_SAMPLE_BYTES", SAMPLE)
        with process_links() as found:
            yield found


def counted(connection: Connection):
    return connection.sent_bytes, connection.shared_bytes, connection.taken_bytes


def cases(links: ProcessLinks):
    return {(case.quantity.work, case.prepare().size): case.prepare() for case in links.cases()}


def test_both_ways_sizes_and_a_short_message_are_measured(links):
    assert list(cases(links)) == [
        ("shared memory", PIECE // 2),
        ("shared memory", PIECE),
        ("socket", PIECE // 2),
        ("socket", PIECE),
        (BOTH, PIECE),
        (MESSAGE, 1),
    ]


@pytest.mark.parametrize("size", [PIECE // 2, PIECE])
@pytest.mark.parametrize("number", [0, 1])
def test_sample_goes_the_way_that_it_is_named_for(links, number, size):
    way = link_cases.WAYS[number]
    prepared, connection = cases(links)[way, size], links._connections[number]
    prepared.run()  # in which shared memory is offered
    before = counted(connection)
    prepared.run()
    sent, shared, taken = (b - a for a, b in zip(before, counted(connection), strict=True))
    assert prepared.amount == sent == SAMPLE
    assert shared == (SAMPLE if way == "shared memory" else 0)
    assert taken == 0


def test_both_directions_move_a_sample_each(links):
    prepared, connection = cases(links)[BOTH, PIECE], links._connections[0]
    before = counted(connection)
    prepared.run()
    sent, _, taken = (b - a for a, b in zip(before, counted(connection), strict=True))
    assert prepared.amount == sent + taken == 2 * SAMPLE


def test_short_message_moves_nothing_and_counts_each_way(links):
    prepared, connection = cases(links)[MESSAGE, 1], links._connections[0]
    before = counted(connection)
    prepared.run()
    assert counted(connection) == before
    assert prepared.amount == 2


def test_connection_that_ends_is_an_error_and_the_process_ends_with_it(monkeypatch):
    started = []
    forked = link_cases._forked
    monkeypatch.setattr(
        link_cases, "_forked", lambda *given: started.append(forked(*given)) or started[-1]
    )
    with process_links() as links:
        case = next(iter(links.cases())).prepare()
        os.kill(started[0], signal.SIGKILL)
        with pytest.raises(ClusterError, match="messages between processes cannot be measured: "):
            case.run()
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_process_that_does_not_connect_is_an_error(monkeypatch):
    def refuse(address, token):
        raise OSError("no")

    monkeypatch.setattr(link_peer, "serve", refuse)
    with (
        pytest.raises(ClusterError, match="the other process ended with exit code 1"),
        process_links(),
    ):
        pass
