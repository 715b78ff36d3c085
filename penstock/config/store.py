"""`store`: how weights, gradients and optimizer state are kept."""

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
        "size limit of the folder, such as 60GiB; null: no limit but the disk",
        unit="bytes",
        example="60GiB",
    )
    keep_steps: int = setting(
        2, "number of durable steps to keep; each can be opened again", unit="steps", ge=1
    )
    durable_every: int = setting(
        1,
        "steps between durable steps. A larger number needs fewer syncs, and state in memory is "
        "written for durable steps only; a crash loses the steps since the last durable step",
        unit="steps",
        ge=1,
    )
    speculate: Literal["off", "on", "auto"] = setting(
        "off",
        "on: weights are updated as their gradients arrive, before the norm of all gradients is "
        "known, as if nothing was clipped; where that was wrong, they are updated again. The "
        "result is the same to the bit. auto: while steps wait for flash, and their norms are "
        "below optimizer.clip_norm",
    )


class StoreConfig(Section):
    """The store's choices."""

    gradients: Literal["fp32", "bf16", "auto"] = setting(
        "auto", "type in which the store keeps gradients; auto: the type of `precision`"
    )
    dram: Annotated[
        ByteSize | Literal["auto"],
        PlainValidator(size_or_auto),
        PlainSerializer(str),
    ] = setting(
        "auto",
        "memory of the store, such as 4GiB; auto: what the store needs, or with flash a share of "
        "the memory that is free at the start",
        unit="bytes",
    )
    shards: int = setting(
        1,
        "number of shards of the store, each with an equal part of the bytes of every stage. The "
        "result is the same to the bit for any number. Sizes are totals of all shards",
        ge=1,
        le=64,
    )
    replicas: int = setting(
        1,
        "processes that hold each shard, with cluster.shards: apart. With 2, a lost shard is "
        "rebuilt from its replica, and no step is lost. Sizes are totals of all replicas",
        ge=1,
        le=2,
    )
    early_weights: bool = setting(
        True,
        "with engines on a GPU and a store in memory in one shard: where a step waits for updates, "
        "new weights are streamed first and their optimizer state is updated later in the step. "
        "The result is the same to the bit. It takes 2 bytes per parameter of bf16 runs, 4 of fp32 "
        "runs; false: none",
    )
    flash: FlashConfig = section(FlashConfig, "a store larger than memory")

    @property
    def holders(self) -> int:
        """The number of stores that hold a shard; they share the configured sizes."""
        return self.shards * self.replicas
