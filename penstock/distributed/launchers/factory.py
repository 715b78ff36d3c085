"""Selection of the launcher that a configuration names."""

import contextlib
from collections.abc import Callable

from penstock.config import Config
from penstock.distributed.launchers.base import ExternalLauncher, Launcher
from penstock.distributed.launchers.local import LocalLauncher
from penstock.distributed.transport import Endpoint

WORKER_LOGS = "workers"


def make_launcher(
    config: Config, device: str, token: str, cleanup: contextlib.ExitStack
) -> tuple[str, Callable[[Endpoint], Launcher]]:
    """Return the interface on which the run listens, and the constructor of its launcher."""
    host = config.cluster.host
    if config.cluster.start == "ray":
        from penstock.distributed.launchers.ray import RayConnection, RayLauncher

        connection = RayConnection(config, device)
        cleanup.callback(connection.close)
        return (
            connection.host if host == "auto" else host,
            lambda endpoint: RayLauncher(connection, endpoint.address, token),
        )
    host = "127.0.0.1" if host == "auto" else host
    if config.cluster.start == "listen":
        return host, lambda endpoint: ExternalLauncher()
    from penstock.engine import target_of

    logs = config.run.dir / WORKER_LOGS
    forks = target_of(device).survives_fork
    return host, lambda endpoint: LocalLauncher(endpoint.address, token, logs, forks=forks)
