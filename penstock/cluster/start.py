"""From a configuration to a run whose engines are other processes."""

from __future__ import annotations

from collections.abc import Callable

from penstock.batches import Batches
from penstock.cluster.launch import LocalLauncher
from penstock.cluster.runner import ClusterRunner
from penstock.config import Config
from penstock.events import ClusterEvent
from penstock.fabric.sockets import new_token
from penstock.step_layout import Layout
from penstock.store import ShardedStore, ShardMap, Store

WORKER_LOGS = "workers"


def start_cluster(
    config: Config,
    layout: Layout,
    store: Store,
    batches: Batches,
    *,
    tokens: int,
    tell: Callable[[ClusterEvent], None],
) -> ClusterRunner:
    """Start the run's workers and return what has them make steps."""
    program, token = layout.program, new_token()
    shard_map = ShardMap.of(program, config.store.shards)
    holdings = {
        name: [(piece.shard, piece.begin, piece.end) for piece in pieces]
        for name, pieces in shard_map.pieces.items()
    }
    return ClusterRunner(
        config,
        layout,
        store,
        store.shards if isinstance(store, ShardedStore) else [store],
        holdings,
        batches,
        tokens=tokens,
        token=token,
        launch=lambda endpoint: LocalLauncher(
            endpoint.address, token, config.run.dir / WORKER_LOGS
        ),
        tell=tell,
    )
