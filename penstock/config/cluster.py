"""`cluster`: where engines run, and when they count as lost."""

from __future__ import annotations

from typing import Literal

from penstock.config.section import Section, setting


class ClusterConfig(Section):
    """Engines in processes of their own; the result is the same to the bit."""

    start: Literal["none", "local"] = setting(
        "none",
        "where engines run: none, in this process, one after another; local, in processes of this "
        "machine, which are replaced when they are lost",
    )
    spare: int = setting(
        1, "engines that are started beyond `engines` and wait, ready", unit="engines", ge=0, le=64
    )
    lease: float = setting(
        1.0, "an engine that is silent for so long is lost", unit="seconds", gt=0, le=3600
    )
    stall: float = setting(
        5.0,
        "a step in which nobody computes and nothing moves for so long begins anew",
        unit="seconds",
        gt=0,
        le=3600,
    )
    host: str = setting("127.0.0.1", "the interface on which the run listens")
