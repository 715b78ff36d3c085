"""Whose memory the shards of a store take, by where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock import assembly, process_memory
from penstock.config import Config
from penstock.errors import BudgetError
from penstock.step_layout import Layout, lay_out

MIB = 1 << 20
WIDE = {"n_layer": 8, "n_embd": 256, "n_head": 4, "vocab_size": 96, "n_positions": 32}


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """A machine on which 270 MiB are free, most of which the parts other than the store take."""
    monkeypatch.setattr(process_memory, "resident_bytes", lambda: 400 * MIB)
    monkeypatch.setattr(process_memory, "available_bytes", lambda: 270 * MIB)


def layout(folder: Path, **changes) -> Layout:
    config = Config.from_mapping(
        {
            "model": {"preset": "gpt2", "overrides": WIDE},
            "batch": {"size": 4, "micro": 1},
            "engine": {"device": "cpu", "memory": "16MiB"},
            "engines": 2,
            "run": {"dir": str(folder)},
            **changes,
        }
    )
    assert config.model is not None
    return lay_out(config, assembly.model_source(config.model), "cpu", 32)


OTHER_HOSTS = [
    {"start": "listen", "shards": "apart"},
    {"start": "ray", "address": "10.0.0.1:6379", "shards": "apart"},
]
THIS_HOST = [
    {"start": "listen"},
    {"start": "local", "shards": "apart"},
    {"start": "ray", "shards": "apart"},
]


@pytest.mark.parametrize("cluster", OTHER_HOSTS)
def test_a_store_in_the_memory_of_other_hosts_may_be_larger_than_this_one(tmp_path, cluster):
    made = layout(tmp_path, cluster=cluster, store={"shards": 4})
    # Weights, gradients and two moments of AdamW, in float32.
    assert made.shares.store >= 16 * made.program.parameters > 90 * MIB


@pytest.mark.parametrize("cluster", THIS_HOST)
def test_a_store_in_the_memory_of_this_host_must_fit_it(tmp_path, cluster):
    with pytest.raises(BudgetError, match="cannot hold this run") as caught:
        layout(tmp_path, cluster=cluster, store={"shards": 4})
    assert "other hosts" not in str(caught.value)


@pytest.mark.parametrize("cluster", OTHER_HOSTS)
def test_the_memory_of_shards_on_flash_is_that_of_their_hosts(tmp_path, cluster):
    store = {"shards": 4, "dram": "2GiB", "flash": {"path": str(tmp_path / "flash")}}
    assert layout(tmp_path, cluster=cluster, store=store).shares.store == 2048 * MIB
    with pytest.raises(BudgetError, match=r"lower store\.dram"):
        layout(tmp_path, cluster={"start": "local", "shards": "apart"}, store=store)


def test_what_still_does_not_fit_is_not_blamed_on_the_store(tmp_path):
    with pytest.raises(BudgetError) as caught:
        layout(
            tmp_path,
            cluster=OTHER_HOSTS[0],
            store={"shards": 4},
            engine={"device": "cpu", "memory": "1GiB"},
            memory="600MiB",
        )
    lines = str(caught.value).splitlines()
    assert any(line.startswith("  calls to the store's shards, on other hosts") for line in lines)
    assert "store.dram" not in lines[-1]
    assert "raise memory above" in lines[-1]
