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
        "where engines run. none: in this process, one after another; local: in processes of this "
        "machine, replaced after a failure; ray: in actors of a Ray cluster, replaced after a "
        "failure; listen: in processes that you start yourself on any host",
    )
    address: str | None = setting(
        None,
        "the Ray cluster. auto: the cluster of this machine; HOST:PORT: the cluster with this "
        "head; ray://HOST:PORT: the cluster with this client server; null: a new cluster on this "
        "machine, for this run",
        example="auto",
    )
    environment: Patterns = setting(
        (),
        "environment variables of this process that are copied to the actors of a Ray cluster; "
        "PYTHONPATH is always copied",
        example=["HF_HOME"],
    )
    spare: int = setting(
        1, "standby engines, started in addition to `engines`", unit="engines", ge=0, le=64
    )
    shards: Literal["here", "apart"] = setting(
        "here",
        "where the shards of the store are. here: in this process; apart: each in its own "
        "process, started like an engine, so that the store can use the memory of several hosts",
    )
    lease: float = setting(
        1.0,
        "an engine or a shard that sends nothing for this time is considered lost",
        unit="seconds",
        gt=0,
        le=3600,
    )
    stall: float = setting(
        5.0,
        "a step in which nothing is computed and under 64 kbit/s arrive for this time is restarted",
        unit="seconds",
        gt=0,
        le=3600,
    )
    longest_job: float = setting(
        600.0,
        "time limit for one stage on an engine and for one update on a shard; an engine or a "
        "shard that exceeds the limit is removed. If two engines exceed it, the run ends. A worker "
        "that has not joined within this time, at least 120 s, of its start is ended, and so is "
        "one whose main thread uses no processor for as long before it is ready",
        unit="seconds",
        gt=0,
        le=86400,
    )
    slow: float = setting(
        2.0,
        "an engine that takes more than this many times as long as the others is reported as slow",
        gt=1,
        le=1000,
    )
    evict_slow: int | None = setting(
        None,
        "an engine that is slow this many times in a row is replaced, if a standby engine is "
        "ready; null: it is only reported",
        example=5,
        ge=1,
    )
    shared_memory: Literal["auto", "off"] = setting(
        "auto",
        "how processes of one host exchange weights and gradients. auto: through shared memory; "
        "off: through sockets, as between hosts",
    )
    host: str = setting(
        "auto",
        "address of this machine on which the run listens; auto: 127.0.0.1, or with "
        "`cluster.address` the address at which the Ray cluster reaches this machine",
        example="10.0.0.1",
    )
    port: int = setting(
        0,
        "port on which the run listens, to be opened in a firewall; 0: a free port, chosen by the "
        "system",
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
                "expected here, got apart: cluster.start is none, so no process can hold the "
                "shards; set cluster.start to local, ray or listen",
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
    replica each, and there are no relays.
    """
    start: dict[str, Any] = {"start": where, "address": None, "environment": []}
    if where == "none":
        return {
            "cluster": {**start, "shards": "here"},
            "store": {"replicas": 1},
            "fabric": {"relays": "auto"},
        }
    if where == "ray":
        return {"cluster": {"start": where}}
    if where in _STARTS:
        return {"cluster": start}
    return {"cluster": {"start": "ray", "address": where}}
