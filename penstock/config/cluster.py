"""`cluster`: where engines run, and when they count as lost."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import model_validator

from penstock.config.section import Patterns, Section, refuse, setting

_ADDRESS = re.compile(r"auto|(ray://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STARTS = ("none", "local", "ray", "listen")


class ClusterConfig(Section):
    """Engines and shards in processes of their own; the result is the same to the bit."""

    start: Literal["none", "local", "ray", "listen"] = setting(
        "none",
        "where engines run: none, in this process, one after another; local, in processes of this "
        "machine, which are replaced when they are lost; ray, in actors of a Ray cluster, which "
        "are too; listen, in processes that you start yourself on any host",
    )
    address: str | None = setting(
        None,
        "the Ray cluster: auto, the one that this machine is part of; HOST:PORT of its head; "
        "ray://HOST:PORT of its client server; null: one for this run, on this machine",
        example="auto",
    )
    environment: Patterns = setting(
        (),
        "environment variables that the actors of a Ray cluster get as they are here; PYTHONPATH "
        "they get by themselves",
        example=["HF_HOME"],
    )
    spare: int = setting(
        1, "engines that are started beyond `engines` and wait, ready", unit="engines", ge=0, le=64
    )
    shards: Literal["here", "apart"] = setting(
        "here",
        "where the store's shards are: here, in this process; apart, each in a process of its own, "
        "started as engines are, so that the store has the memory of all their hosts",
    )
    lease: float = setting(
        1.0,
        "an engine or a shard that is silent for so long is lost",
        unit="seconds",
        gt=0,
        le=3600,
    )
    stall: float = setting(
        5.0,
        "a step in which nobody computes and nothing moves for so long begins anew",
        unit="seconds",
        gt=0,
        le=3600,
    )
    longest_job: float = setting(
        600.0,
        "a stage of one engine's share, or an update of a shard, that computes for longer costs "
        "the engine or the shard its place; if two engines take longer, the run ends",
        unit="seconds",
        gt=0,
        le=86400,
    )
    slow: float = setting(
        2.0,
        "an engine that takes more than so many times as long as the others is named",
        gt=1,
        le=1000,
    )
    evict_slow: int | None = setting(
        None,
        "an engine that is found slow so many times in a row is replaced, if another is ready; "
        "null: it is only named",
        example=5,
        ge=1,
    )
    shared_memory: Literal["auto", "off"] = setting(
        "auto",
        "what processes of one host exchange weights and gradients through: auto, memory that both "
        "see; off, sockets, as between hosts",
    )
    host: str = setting(
        "auto",
        "this machine's address on which the run listens; auto: 127.0.0.1, or with "
        "`cluster.address` the one by which the Ray cluster reaches it",
        example="10.0.0.1",
    )
    port: int = setting(
        0,
        "the port on which the run listens, to be opened in a firewall; 0: one that is free, "
        "chosen by the system",
        example=29600,
        ge=0,
        le=65535,
    )

    @property
    def has_other_hosts(self) -> bool:
        """Whether processes of the run may be on other machines."""
        return self.start == "listen" or (self.start == "ray" and self.address is not None)

    @model_validator(mode="after")
    def _consistent(self) -> ClusterConfig:
        if self.address is not None and not _ADDRESS.fullmatch(self.address):
            raise refuse(
                "address",
                f"expected auto, HOST:PORT, ray://HOST:PORT or null, got {self.address!r}",
            )
        for key in ("address", "environment"):
            if getattr(self, key) and self.start != "ray":
                raise refuse(
                    key, f"expected nothing with cluster.start: {self.start}; only ray takes it"
                )
        if self.shards == "apart" and self.start == "none":
            raise refuse(
                "shards",
                "expected here with cluster.start: none, which starts no processes; set "
                "cluster.start to local, ray or listen",
            )
        for name in self.environment:
            if not _NAME.fullmatch(name):
                raise refuse(
                    "environment", f"expected names of environment variables, got {name!r}"
                )
        return self


def cluster_keys(where: str) -> dict[str, dict[str, Any]]:
    """Return the keys that `Trainer(cluster=...)` sets, by section.

    The argument is a launcher or an address. In one process, all shards are local and have one
    replica each.
    """
    start: dict[str, Any] = {"start": where, "address": None, "environment": []}
    if where == "none":
        return {"cluster": {**start, "shards": "here"}, "store": {"replicas": 1}}
    if where == "ray":
        return {"cluster": {"start": where}}
    if where in _STARTS:
        return {"cluster": start}
    return {"cluster": {"start": "ray", "address": where}}
