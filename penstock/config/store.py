"""`store`: how weights, gradients and optimizer state are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PlainSerializer, PlainValidator

from penstock.config.section import PathText, Section, section, setting
from penstock.config.size import ByteSize, size_or_auto


class FlashConfig(Section):
    """The tier below memory: a store on flash is larger than memory, and every step is durable."""

    path: PathText | None = setting(
        None,
        "folder on a fast disk for weights and optimizer state; null: they stay in memory",
        example="runs/large/flash",
    )
    size: ByteSize | None = setting(
        None,
        "most that the folder may take, such as 60GiB; null: what it needs and the disk has",
        unit="bytes",
        example="60GiB",
    )
    keep_steps: int = setting(2, "durable steps that can be opened again", unit="steps", ge=1)
    durable_every: int = setting(
        1,
        "make only every so many steps durable: fewer syncs, and what stays in memory is written "
        "for these steps only; a crash costs the steps since",
        unit="steps",
        ge=1,
    )


class StoreConfig(Section):
    """The store's choices."""

    gradients: Literal["fp32", "bf16", "auto"] = setting(
        "auto", "type in which the store keeps gradients; auto: that of `precision`"
    )
    dram: Annotated[
        ByteSize | Literal["auto"],
        PlainValidator(size_or_auto),
        PlainSerializer(str),
    ] = setting(
        "auto",
        "memory of the store, such as 4GiB; auto: what it needs, or with flash a share of what is "
        "free at the start",
        unit="bytes",
    )
    shards: int = setting(
        1,
        "parts in which the store is held, of equal bytes of every stage; the result is the same "
        "to the bit for any; sizes are those of all together",
        ge=1,
        le=64,
    )
    replicas: int = setting(
        1,
        "processes that hold each shard, with cluster.shards: apart; with 2 a shard that is lost "
        "comes back from the other, without a step being lost; sizes are those of all together",
        ge=1,
        le=2,
    )
    flash: FlashConfig = section(FlashConfig, "a store larger than memory")

    @property
    def holders(self) -> int:
        """The number of stores that hold a shard; they share the configured sizes."""
        return self.shards * self.replicas
