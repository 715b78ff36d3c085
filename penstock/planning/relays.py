"""The number of relays between the store and the engines of a run."""

from __future__ import annotations

from penstock.config import Config
from penstock.distributed.protocol import enough_relays


def relay_count(config: Config, engines: int | None = None) -> int:
    """Return how many relays a run has with so many engines; None: those of its configuration.

    Relays on the host of the engines relieve no link. So `auto` is none on one machine, and none
    where only a user starts processes.
    """
    relays, cluster = config.fabric.relays, config.cluster
    if relays != "auto":
        return relays
    if cluster.start != "ray" or cluster.address is None:
        return 0
    return enough_relays(config.engines if engines is None else engines)
