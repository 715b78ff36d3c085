"""Which node of a Ray cluster the next worker is to be on."""

from __future__ import annotations

import time

import pytest

from penstock.distributed.launchers.ray_placement import PlacementPolicy


def node(name: str, *, cpus: float = 4, gpus: float = 0, alive: bool = True) -> dict:
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return {"NodeID": name, "Alive": alive, "Resources": resources}


WANTED = {"CPU": 2, "GPU": 0}


@pytest.fixture
def spreading() -> PlacementPolicy:
    return PlacementPolicy()


def test_workers_are_spread_evenly(spreading):
    nodes, here = [node("a"), node("b"), node("c")], []
    for _ in range(7):
        here.append(spreading.choose(nodes, WANTED, here))
    assert sorted(map(here.count, "abc")) == [2, 2, 3]


def test_node_that_lost_worker_gets_next(spreading):
    """Otherwise both replicas of a shard would soon be on one host."""
    nodes = [node("a"), node("b")]
    assert spreading.choose(nodes, WANTED, ["a", "b", "a"]) == "b"
    spreading.worker_left("b", was_ended=False)
    assert spreading.choose(nodes, WANTED, ["a", "b"]) == "b"
    spreading.worker_left("a", was_ended=False)
    assert spreading.choose(nodes, WANTED, ["a", "b"]) == "a"


def test_suspect_node_is_chosen_last_for_a_minute(spreading, monkeypatch):
    nodes = [node("a"), node("b"), node("c")]
    spreading.worker_left("a", was_ended=True)
    assert spreading.choose(nodes, WANTED, ["b", "c", "c"]) == "b"
    spreading.worker_left("b", was_ended=True)
    spreading.worker_left("c", was_ended=True)
    assert spreading.choose(nodes, WANTED, ["a", "c"]) == "b"  # any may be dead
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert spreading.choose(nodes, WANTED, ["b", "c", "c"]) == "a"


def test_dead_or_small_node_is_never_chosen():
    spreading, wanted = PlacementPolicy(), {"CPU": 2, "GPU": 1}
    nodes = [
        node("head", cpus=0),
        node("small", cpus=1, gpus=1),
        node("no-gpu"),
        node("dead", gpus=8, alive=False),
        node("a", gpus=1),
        node("b", gpus=1),
    ]
    assert spreading.choose(nodes, wanted, ["a"]) == "b"
    assert spreading.choose(nodes, wanted, ["b", "b", "a"]) == "a"


def test_ray_chooses_when_only_one_node_fits(spreading):
    assert spreading.choose([], WANTED, []) is None
    assert spreading.choose([node("a")], WANTED, []) is None
    assert spreading.choose([node("a"), node("b", alive=False)], WANTED, ["a", None]) is None


def test_engines_and_shards_are_spread_separately(spreading):
    """Else the replicas of a shard would go where no engine finds room, all to one node."""
    gpu, cpu = {"CPU": 4, "GPU": 1}, {"CPU": 1, "GPU": 0}
    nodes = [node("a", gpus=2), node("b", gpus=2), node("c"), node("d")]
    shards: list[str | None] = []
    for _ in range(4):
        shards.append(spreading.choose(nodes, cpu, shards))
    assert sorted(map(str, shards)) == ["a", "b", "c", "d"]
    engines: list[str | None] = []
    for _ in range(4):
        engines.append(spreading.choose(nodes, gpu, engines, shards))
    assert sorted(map(str, engines)) == ["a", "a", "b", "b"]
    # One shard of "a" is lost: the others have one each, whatever there is of engines.
    assert spreading.choose(nodes, cpu, ["b", "c", "d"], engines) == "a"
    assert spreading.choose(nodes, cpu, shards, ["a", "a", "b", "c"]) == "d"
