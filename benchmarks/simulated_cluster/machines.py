"""Engines, their links and the shards that serve them, published or measured; and their loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.distributed.protocol import enough_relays
from penstock.distributed.simulation import Links

SOCKET_BYTES_PER_SECOND = 3.76e9
"""Of one link over sockets between two processes of a machine: `engines.py`, in README.md."""


@dataclass(frozen=True)
class Machine:
    """An engine, its link, and the shards that serve it.

    `flops` is what the engine reaches per second, `memory_bytes` what it computes in;
    `takes_messages` says whether weights and gradients on their way lie in that memory as well, or
    in another, which its host has. `store_bytes_per_second` is the rate of one shard's memory. A
    weight takes `weight_width` bytes of a link; None: as many as in the program.
    """

    name: str
    links: Links
    flops: float
    memory_bytes: int
    takes_messages: bool
    shards: int
    store_bytes_per_second: float
    weight_width: int | None = None


@dataclass(frozen=True)
class Load:
    """What one engine does in a step: `sequences` of `length` tokens, one micro-batch each.

    What an operation sends is simulated in at most `chunks` chunks, none smaller than a run's. With
    fewer than a run's it takes longer, since a chunk goes on only when all of it has come. `relays`
    is the number of relays; `auto`: as many as a run takes. `layers` replaces those of the model;
    `slot_bytes` is the most that the weights of a stage take.
    """

    model: str
    precision: Literal["fp32", "bf16"]
    sequences: int
    length: int = 2048
    chunks: int = 8
    relays: int | Literal["auto"] = 0
    layers: int | None = None
    slot_bytes: int | None = None

    def relays_of(self, engines: int) -> int:
        """How many relays a run with so many engines has."""
        return enough_relays(engines) if self.relays == "auto" else self.relays

    @property
    def tokens(self) -> int:
        """How many tokens that are."""
        return self.sequences * self.length


# The wafer's peak at 1.1 GHz with numbers of 16 bits, the fastest that is quoted: nothing hides
# better behind it. A relay (SwarmX) has one link like that of a wafer; without relays wafers hand
# weights on, and add sums, over their own links. On these a weight takes 32 bits, which hold 16 of
# its own and where it belongs.
CS2 = Machine("CS-2, 1.2 Tb/s", Links(150e9, 1e-5), 7.5e15, 40 * 10**9, True, 1, 4e12, 4)

# 40 % of the H200's peak in bf16.
H200 = Machine("H200, 100 Gb/s", Links(12.5e9, 2e-5), 4e14, 141 * 10**9, False, 4, 300e9)
