"""From a configuration to a run whose engines are other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from penstock.batches import Batches
from penstock.cluster import record
from penstock.cluster.launch import Launcher, LocalLauncher, NoLauncher
from penstock.cluster.plan import holdings_of
from penstock.cluster.runner import ClusterRunner
from penstock.config import Config
from penstock.events import ClusterEvent
from penstock.fabric.sockets import Endpoint, new_token
from penstock.step_layout import Layout
from penstock.store import ShardedStore, Store

WORKER_LOGS = "workers"


def start_cluster(
    config: Config,
    layout: Layout,
    store: Store,
    batches: Batches,
    *,
    tokens: int,
    tell: Callable[[ClusterEvent], None],
    should_stop: Callable[[], bool],
) -> ClusterRunner:
    """Start the run's workers and return what has them make steps."""
    program, token = layout.program, new_token()
    holdings = holdings_of(program, config.store.shards)
    with contextlib.ExitStack() as undo:
        host, launch = _place(config, token, undo)
        runner = ClusterRunner(
            config,
            layout,
            store,
            store.shards if isinstance(store, ShardedStore) else [store],
            holdings,
            batches,
            tokens=tokens,
            host=host,
            token=token,
            launch=launch,
            tell=tell,
            should_stop=should_stop,
        )
        undo.pop_all()  # from here on it is the launcher's to end what was begun
    if config.cluster.start == "listen":
        address = "{}:{}".format(*runner.address)
        text = f"at {address}; on each engine's host: python -m penstock.cluster.worker "
        tell(ClusterEvent("listening", f"{text}{config.run.dir.absolute() / record.NAME}"))
    return runner


def _place(
    config: Config, token: str, undo: contextlib.ExitStack
) -> tuple[str, Callable[[Endpoint], Launcher]]:
    """Return where the run listens, and what makes its launcher."""
    host = config.cluster.host
    if config.cluster.start == "ray":
        from penstock.cluster.on_ray import RayConnection, RayLauncher

        connection = RayConnection(config)
        undo.callback(connection.close)
        return (
            connection.host if host == "auto" else host,
            lambda endpoint: RayLauncher(connection, endpoint.address, token),
        )
    host = "127.0.0.1" if host == "auto" else host
    if config.cluster.start == "listen":
        return host, lambda endpoint: NoLauncher()
    logs = config.run.dir / WORKER_LOGS
    return host, lambda endpoint: LocalLauncher(endpoint.address, token, logs)
