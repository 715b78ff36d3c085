from __future__ import annotations

import pytest
from recording_endpoints import RecordingEndpoint

from penstock.distributed.transport import stream


@pytest.fixture(params=["within a host", "between hosts"])
def endpoints(request, monkeypatch):
    """What makes endpoints: their connections are plain, or TLS as those between hosts are."""
    if request.param == "between hosts":
        monkeypatch.setattr(stream, "is_within_host", lambda connection: False)
    yield from _endpoints()


@pytest.fixture
def hosts(monkeypatch):
    """What makes endpoints as if each were on a host of its own."""
    monkeypatch.setattr(stream, "is_within_host", lambda connection: False)
    yield from _endpoints()


def _endpoints():
    made: list[RecordingEndpoint] = []

    def make(token: str, number: int) -> RecordingEndpoint:
        made.append(RecordingEndpoint(token, number))
        return made[-1]

    yield make
    for place in made:
        place.endpoint.close()
        assert not place.failed
