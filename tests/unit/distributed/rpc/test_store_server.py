"""What a shard's store can be called for: what is in the table, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.distributed.rpc import store_server
from penstock.distributed.rpc.rpc import RpcMessage
from penstock.errors import ClusterError, StorageError

NAMES = ["__class__", "master", "store", "Read", "read ", "", None, 3, ["read"], {}]


class PretendStore:
    """Takes note of what it was given."""

    step = 5

    def __init__(self) -> None:
        self.given: list[object] = []

    def read(self, name, role, begin, end):
        self.given.append((name, role, begin, end))
        if name == "lost":
            raise StorageError("no such weight; look at its name")
        return np.arange(begin, end, dtype=np.float32)

    def finish_restore(self, step):
        self.given.append(step)
        self.step = step


class Place:
    def __init__(self) -> None:
        self.store = PretendStore()
        self.is_closed = False

    def open(self, must_hold=False):
        raise AssertionError

    def close(self):
        self.is_closed = True


def call(place: Place, method: object, **arguments) -> RpcMessage:
    return store_server.respond(place, RpcMessage({"method": method, "with": arguments}))


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_unknown_method_is_refused(name):
    place = Place()
    said = call(place, name, name="w", role="master", begin=0, end=1)
    assert said.body["error"] == ClusterError.__name__
    assert "expected a method of a shard's store" in said.body["text"]
    assert not place.store.given
    assert not place.is_closed


def test_response_has_step_of_store():
    place = Place()
    assert call(place, "finish_restore", step=9).body["step"] == 9
    said = call(place, "read", name="w", role="master", begin=2, end=5)
    assert said.body["step"] == 9
    assert said.arrays["values"].tolist() == [2.0, 3.0, 4.0]
    assert place.store.given == [9, ("w", "master", 2, 5)]


def test_response_to_close_has_no_step():
    place = Place()
    assert dict(call(place, "close").body) == {}
    assert place.is_closed


def test_error_response_has_name_and_text():
    said = call(Place(), "read", name="lost", role="master", begin=0, end=1)
    assert dict(said.body) == {
        "error": "StorageError",
        "text": "no such weight; look at its name",
    }


@pytest.mark.parametrize("arguments", [{}, {"name": "w", "role": "m", "begin": "x", "end": 2}])
def test_invalid_arguments_give_error_response(arguments):
    place = Place()
    assert call(place, "read", **arguments).body["error"] == "ClusterError"
    assert not place.store.given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_are_sent_as_bytes(dtype):
    values = torch.arange(12).to(dtype).view(3, 4)
    flat = store_server.bytes_of(values)
    assert flat.ndim == 1
    assert flat.tobytes() == values.view(torch.uint8).numpy().tobytes()
