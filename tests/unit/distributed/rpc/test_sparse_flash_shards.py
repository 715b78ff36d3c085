"""Sparse weights in shards on flash that are used by calls, as those of other processes are."""

from __future__ import annotations

from functools import partial

import pytest
from replicated_run import Nodes
from sharded_stores import rule_of
from sparse_stores import assert_same_sparse_state, mask_rule, sparse_program, sparse_store, step
from store_programs import flash_store, random_weights

from penstock.distributed.replication.rebuild import copy_shard
from penstock.distributed.rpc import StoreClient
from penstock.store import AdamW, ShardMap
from penstock.store.flash import ShardedFlashStore

SETTINGS = {"clip_norm": 1.0, "optimizer": AdamW(0.9, 0.95, 1e-8, moments="8bit")}
COUNT, COPY = 2, 10


class Remote:
    """Stores on flash behind nodes, and what the trainer's process makes of them."""

    def __init__(self, folder) -> None:
        self._folder = folder
        self.program, self.masks = sparse_program("rigl"), mask_rule("rigl")
        self.map = ShardMap.of(self.program, COUNT)
        self.parts = list(self.map.parts(self.program))
        self.nodes: Nodes | None = None

    def opened(self, shard, replica=0):
        folder = self._folder / f"shard-{shard}{f'-replica-{replica}' if replica else ''}"
        options = {**SETTINGS, "masks": self.masks, "dram_bytes": 2_000_000}
        return flash_store(self.parts[shard], folder, **options)

    def open(self) -> ShardedFlashStore:
        def connected(shard, folder):
            self.nodes.stores[shard] = self.opened(shard)
            return StoreClient(
                self.parts[shard],
                self.nodes,
                nodes=lambda: [shard],
                await_node=lambda: None,
                refuse=lambda node, error: pytest.fail(str(error)),
                copy=lambda source, target: None,
                rule=rule_of(SETTINGS),
                replicas=1,
            ).open()

        self.nodes = Nodes({})
        openers = [partial(connected, shard) for shard in range(COUNT)]
        roles, rule = SETTINGS["optimizer"].roles, rule_of(SETTINGS)
        return ShardedFlashStore(
            self.program, self._folder, self.map, openers, roles, rule, masks=self.masks
        )


def test_shards_behind_calls_have_the_bits_of_one_store_and_are_copied(tmp_path):
    remote = Remote(tmp_path / "flash")
    theirs, ours = sparse_store(remote.program, remote.masks, **SETTINGS), remote.open()
    assert ours.is_new
    for store in (theirs, ours):
        store.load(random_weights(remote.program, 1).items())
    for _ in range(3):
        assert step(ours, 5)[0] == step(theirs, 5)[0]
    assert_same_sparse_state(ours, theirs)
    ours.make_durable()
    ours.close()
    ours = remote.open()  # its masks come from the shards
    assert ours.mask_sizes == theirs.mask_sizes
    assert step(ours, 5)[0] == step(theirs, 5)[0]
    nodes = remote.nodes
    nodes.stores[COPY] = copy = remote.opened(0, replica=1)
    assert copy_shard(nodes, 0, nodes.address, COPY, lambda: None) > 0
    nodes.stores[0].close()
    nodes.stores[0] = copy
    while theirs.step < 7:
        assert step(ours, 5)[0] == step(theirs, 5)[0]
    assert_same_sparse_state(ours, theirs)
    ours.close()
