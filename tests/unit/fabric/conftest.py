from __future__ import annotations

import pytest
from socket_places import Place


@pytest.fixture
def places():
    made: list[Place] = []

    def make(token: str, number: int) -> Place:
        made.append(Place(token, number))
        return made[-1]

    yield make
    for place in made:
        place.endpoint.close()
        assert not place.failed
