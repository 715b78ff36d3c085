"""From a configuration to the hall in which the processes of a run meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from penstock.config import Config
from penstock.distributed import rendezvous_file
from penstock.distributed.control.cluster_manager import Hall
from penstock.distributed.launchers.local import Launcher, LocalLauncher, NoLauncher
from penstock.distributed.transport import Endpoint, new_token
from penstock.planning.execution_plan import Layout
from penstock.telemetry.events import ClusterEvent

WORKER_LOGS = "workers"


def open_hall(
    config: Config,
    layout: Layout,
    *,
    tell: Callable[[ClusterEvent], None],
    should_stop: Callable[[], bool],
) -> Hall:
    """Open the door of a run and start its workers; they come when they can."""
    token = new_token()
    with contextlib.ExitStack() as undo:
        host, launch = _place(config, layout.device, token, undo)
        hall = Hall(
            config,
            layout,
            host=host,
            token=token,
            launch=launch,
            tell=tell,
            should_stop=should_stop,
        )
        undo.pop_all()  # from here on it is the launcher's to end what was begun
    if config.cluster.start == "listen":
        _say_where(config, hall, tell)
    return hall


def _say_where(config: Config, hall: Hall, tell: Callable[[ClusterEvent], None]) -> None:
    """Say how to start workers, where that is left to people."""
    command = (
        f"python -m penstock.cluster.worker {config.run.dir.absolute() / rendezvous_file.NAME}"
    )
    text = "at {}:{}; on each engine's host: ".format(*hall.address) + command
    if config.cluster.shards == "apart":
        text += f"; and first, on each shard's, with --shard 0 to {config.store.shards - 1}"
        if config.store.replicas > 1:
            text += f", each on {config.store.replicas} hosts"
    tell(ClusterEvent("listening", text))


def _place(
    config: Config, device: str, token: str, undo: contextlib.ExitStack
) -> tuple[str, Callable[[Endpoint], Launcher]]:
    """Return where the run listens, and what makes its launcher."""
    host = config.cluster.host
    if config.cluster.start == "ray":
        from penstock.distributed.launchers.ray import RayConnection, RayLauncher

        connection = RayConnection(config, device)
        undo.callback(connection.close)
        return (
            connection.host if host == "auto" else host,
            lambda endpoint: RayLauncher(connection, endpoint.address, token),
        )
    host = "127.0.0.1" if host == "auto" else host
    if config.cluster.start == "listen":
        return host, lambda endpoint: NoLauncher()
    logs = config.run.dir / WORKER_LOGS
    forks = device != "cuda"  # whose driver survives no fork
    return host, lambda endpoint: LocalLauncher(endpoint.address, token, logs, forks=forks)
