"""A layout that all halls of these tests share, and visits to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hall_guests import Guest, Visited, config

from penstock import assembly
from penstock.fabric.messages import Kind, Message
from penstock.step_layout import Layout, lay_out


@pytest.fixture(scope="session")
def layout(tmp_path_factory) -> Layout:
    made = config(tmp_path_factory.mktemp("layout"))
    assert made.model is not None
    return lay_out(made, assembly.model_source(made.model), "cpu", 16)


@pytest.fixture
def visit(tmp_path, layout) -> Iterator:
    made: list[Visited] = []
    guests: list[Guest] = []

    def open_hall(is_in_vain: bool = False, **cluster) -> Visited:
        made.append(Visited(tmp_path, layout, is_in_vain, **cluster))
        return made[-1]

    def arrive(visited: Visited, host: str = "127.0.0.1", **says) -> Guest:
        guests.append(Guest(visited.hall))
        guests[-1].say(Kind.JOIN, worker=f"guest-{len(guests)}", listens=[host, 1], **says)
        return guests[-1]

    def join(visited: Visited, **says) -> tuple[Guest, Message]:
        guest = arrive(visited, **says)
        return guest, guest.hear()

    open_hall.arrive, open_hall.join = arrive, join
    yield open_hall
    for guest in guests:
        guest.endpoint.close()
        assert not guest.failures
    for visited in made:
        visited.hall.close()
