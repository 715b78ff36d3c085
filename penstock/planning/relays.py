"""The number of relays between the store and the engines of a run."""

from penstock.config import Config
from penstock.distributed.protocol import enough_relays


def relay_count(
    config: Config,
    engines: int | None = None,
    *,
    has_links: bool | None = None,
    hosts: int | None = None,
) -> int:
    """Return how many relays a run has with so many engines; None: those of its configuration.

    Relays on the host of an engine or of another relay relieve no link. So `auto` is none on one
    machine, where only a user starts processes, and with fewer hosts than engines and relays.

    Args:
        has_links: whether every process has a link of its own; None: as the configuration says.
        hosts: the number of hosts; None: enough.
    """
    relays, cluster = config.fabric.relays, config.cluster
    if relays != "auto":
        return relays
    if has_links is None:
        has_links = cluster.start == "ray" and cluster.address is not None
    if not has_links:
        return 0
    engines = config.engines if engines is None else engines
    enough = enough_relays(engines)
    return enough if hosts is None or hosts >= engines + enough else 0
