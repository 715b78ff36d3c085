"""Shards on hosts of their own must fit these hosts."""

import dataclasses
import math
import re

import pytest
from described_machines import RACK, TINY
from rich.console import Console

from penstock.config import Config
from penstock.errors import BudgetError
from penstock.machines import MachineDescription
from penstock.planning import RESERVE_BYTES
from penstock.prediction import Planner, Prediction, as_json, page
from penstock.prediction.shard_hosts import require_room_for_shards

APART = {"start": "listen", "shards": "apart"}


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def planned(shards: int, cluster: dict[str, str]) -> Prediction:
    changes = {"cluster": cluster, "store": {"shards": shards}}
    machine = MachineDescription.model_validate(RACK)
    return Planner().plan(Config.from_mapping({**TINY, **changes}), machine)


def on_hosts_of(prediction: Prediction, memory: int) -> Prediction:
    """The same prediction on hosts of so many bytes."""
    machine = prediction.machine
    store = machine.store.model_copy(update={"memory": memory})
    return dataclasses.replace(prediction, machine=machine.model_copy(update={"store": store}))


@pytest.mark.parametrize("shards", [1, 3])
def test_page_has_the_memory_of_each_shard(shards):
    prediction = planned(shards, APART)
    assert prediction.shard_bytes == math.ceil(prediction.plan.shares.store / shards)
    assert as_json(prediction, ())["shard_bytes"] == prediction.shard_bytes
    console = Console(width=200)
    with console.capture() as capture:
        console.print(page(prediction, ()))
    name = "the host" if shards == 1 else "each of 3 hosts"
    assert re.search(rf"{name} of the store's shards +[\d.]+ MiB", capture.get())


def test_store_of_the_coordinator_has_no_hosts_of_shards():
    prediction = planned(2, {"start": "listen"})
    assert prediction.shard_bytes is None
    require_room_for_shards(on_hosts_of(prediction, 1))


def test_shards_that_do_not_fit_their_hosts_are_refused_with_how_many_would():
    prediction = planned(2, APART)
    require_room_for_shards(on_hosts_of(prediction, prediction.shard_bytes + RESERVE_BYTES))
    small = on_hosts_of(prediction, prediction.shard_bytes // 2 + RESERVE_BYTES)
    with pytest.raises(BudgetError, match=r"^store\.shards: each of 2 shards needs ") as caught:
        require_room_for_shards(small)
    told = re.search(
        r"a host of rack has .*; set store\.shards to (\d+) or more", str(caught.value)
    )
    assert told is not None
    fewest = int(told[1])
    assert fewest in (4, 5)
    store = small.config.store.model_copy(update={"shards": fewest})
    config = small.config.model_copy(update={"store": store})
    require_room_for_shards(dataclasses.replace(small, config=config))


def test_hosts_without_any_room_need_another_remedy():
    small = on_hosts_of(planned(2, APART), RESERVE_BYTES)
    with pytest.raises(BudgetError, match=r"MiB; keep the store on flash \(store\.flash\.path\)$"):
        require_room_for_shards(small)
