"""Stores in shards for tests, over the programs of `store_programs`."""

from functools import partial
from pathlib import Path

import torch
from store_programs import CONSTANT, flash_store, training_store

from penstock.store import AdamW, CommitRule, ShardedDramStore, ShardMap
from penstock.store.flash import ShardedFlashStore, SingleFlashShard

LARGE = (
    {"embed": (500, 61), "position": (7, 16)},
    {"0.weight": (130, 170), "0.bias": (130,)},
    {"1.weight": (64, 640), "1.bias": (1,), "1.scale": ()},
    {"2.weight": (4099,), "empty": (0, 3)},
    {"norm": (16,), "embed": (500, 61)},
)
"""Weights that are cut and some that are too small for it; `embed` is tied."""


def rule_of(settings):
    """Return the rule of stores with the settings of `training_store` or `flash_store`."""
    return CommitRule(settings.get("schedule", CONSTANT), settings.get("clip_norm"))


def sharded_dram(program, count, precision="fp32", **settings):
    """Return a store in memory in `count` shards, with the settings of `training_store`."""
    shard_map = ShardMap.of(program, count)
    shards = [training_store(part, precision, **settings) for part in shard_map.parts(program)]
    optimizer = settings.get("optimizer") or AdamW(0.9, 0.95, 1e-8)
    return ShardedDramStore(program, shard_map, shards, optimizer.roles, rule_of(settings))


def sharded_flash(program, folder: Path, count, *, optimizer=None, single=False, **settings):
    """Return a store on flash in `count` shards, with the settings of `flash_store`; with `single`,
    of one shard in the files of a store without shards."""
    optimizer = optimizer or AdamW(0.9, 0.95, 1e-8)
    settings = {"dram_bytes": 900_000, **settings}
    shard_map = ShardMap.of(program, count)
    parts = [shard_map.whole(program)] if single else shard_map.parts(program)
    openers = [partial(flash_store, part, optimizer=optimizer, **settings) for part in parts]
    make = SingleFlashShard if single else ShardedFlashStore
    return make(
        program,
        folder,
        shard_map,
        openers,
        optimizer.roles,
        rule_of(settings),
        masks=settings.get("masks"),
    )


def assert_same_state(ours, theirs):
    """Assert that two stores agree in every bit that they hold."""
    assert ours.step == theirs.step
    for name, spec in theirs.program.weights.items():
        mine, other = ours.master(name), theirs.master(name)
        assert mine.shape == other.shape
        assert torch.equal(mine.view(torch.int32), other.view(torch.int32)), name
        assert ours.roles(name) == theirs.roles(name)
        states = (ours.state(name), theirs.state(name)) if spec.trainable else ({}, {})
        assert states[0].keys() == states[1].keys()
        for role, value in states[1].items():
            assert torch.equal(states[0][role], value), (name, role)
    assert ours.content_hash() == theirs.content_hash()
