"""Construction of a run's store: in memory or on flash, whole or in shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.config import Config, size_above
from penstock.engine import target_of
from penstock.errors import BudgetError
from penstock.planning.sparse_weights import mask_rule_of
from penstock.program import Program
from penstock.store import (
    Assembly,
    CommitRule,
    DramStore,
    Group,
    GroupSettings,
    Holding,
    MaskRule,
    Optimizer,
    Schedule,
    ShardedDramStore,
    ShardedStore,
    ShardMap,
    Store,
    assign_groups,
    dram_store_memory,
    early_weights_bytes,
    make_optimizer,
    mask_memory,
    passing_bytes,
    whole_masks_bytes,
)
from penstock.store.flash import (
    DurableStore,
    FlashStore,
    ShardedFlashStore,
    SingleFlashShard,
    least_dram_bytes,
    mask_change_bytes as flash_mask_change_bytes,
    require_shards,
)

_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RemoteShardStore(DurableStore, Protocol):
    """The store of one shard in another process, in memory or on flash."""

    def open(self) -> RemoteShardStore:
        """Make the other process open its store."""
        ...


def make_store(
    config: Config,
    program: Program,
    device: str = "cpu",
    notice: Callable[[str], None] = lambda text: None,
    remote_shards: Sequence[RemoteShardStore] | None = None,
    masks: MaskRule | None = None,
    streams_early: bool = False,
) -> Store:
    """Return an empty store with the configured optimizer and schedule, for engines on `device`.

    The shards are in this process unless `remote_shards` is given; then the result is not a
    `MemoryStore`. `masks` is the rule of sparse weights. `streams_early` says whether the store has
    memory for weights that are streamed before their update.

    **Raises:** `BudgetError` if the store needs more than `store.dram`.
    """
    roles = optimizer_of(config).roles
    shard_map = ShardMap.of(program, config.store.shards)
    store: Store
    if remote_shards is not None:
        store = ShardedStore(
            program,
            shard_map,
            [shard.open() for shard in remote_shards],
            roles,
            commit_rule(config),
            masks,
        )
    elif is_in_parts(config, program):
        parts = shard_map.parts(program)
        shards = [make_dram_shard(config, program, part, masks) for part in parts]
        store = ShardedDramStore(program, shard_map, shards, roles, commit_rule(config), masks)
    else:
        store = make_dram_shard(config, program, program, masks)
    needed = sum(store.memory_bytes.values())
    require_dram(config, program, needed)
    if streams_early and isinstance(store, DramStore):
        more = early_weights_bytes(program, optimizer_of(config))
        if config.store.dram == "auto" or needed + more <= int(config.store.dram):
            store.allow_early()
    if target_of(device).has_own_memory and not store.page_lock():
        notice(
            "the system did not page-lock all of the weights' memory: weights go to the GPU "
            "through the driver's buffers, which is slower and does not overlap with computation"
        )
    return store


def require_dram(config: Config, program: Program, needed: int) -> None:
    """**Raises:** `BudgetError` if a store in memory needs more bytes than `store.dram`."""
    if config.store.dram != "auto" and needed > int(config.store.dram):
        raise BudgetError(
            f"store.dram: the store of {program.name} needs {needed:,} bytes of memory, the limit "
            f"is {int(config.store.dram):,}; raise it, or set store.flash.path to a folder"
        )


def is_in_parts(config: Config, program: Program) -> bool:
    """Return whether a store is made of shards: a single one, too, if other processes make the
    histograms of its masks."""
    is_distributed = bool(program.capacities) and config.cluster.start != "none"
    return config.store.shards > 1 or is_distributed


def make_dram_shard(
    config: Config, program: Program, holding: Holding, masks: MaskRule | None = None
) -> DramStore:
    """Return an empty store in memory, of a whole program or of a shard's part of it."""
    return DramStore(
        holding,
        config.precision,
        optimizer=optimizer_of(config),
        groups=_groups(config, program),
        rule=commit_rule(config),
        gradient_dtype=_FLOATS[config.gradient_precision],
        masks=masks,
    )


def make_flash_store(
    config: Config,
    program: Program,
    dram_bytes: int,
    folder: Path,
    remote_shards: Sequence[RemoteShardStore] | None = None,
    masks: MaskRule | None = None,
) -> DurableStore:
    """Return the store in a folder on flash, new or existing, with this much memory.

    The shards are opened in this process, or by other processes (`remote_shards`). `masks` is the
    rule of sparse weights.

    **Raises:** the errors of `FlashStore`, and `OtherStoreError` for another number of shards.
    """
    count = config.store.shards
    has_folders = remote_shards is not None or require_shards(folder, count) is not None
    is_single = count == 1 and not has_folders
    if is_single and not is_in_parts(config, program):
        return make_flash_shard(config, program, program, folder, dram_bytes, masks)
    shard_map = ShardMap.of(program, count)
    each = flash_share(config, program, dram_bytes)
    if remote_shards is None:
        openers: list[Callable[[Path], DurableStore]] = [
            functools.partial(make_flash_shard, config, program, part, dram_bytes=each, masks=masks)
            for part in (_parts_of(config, program) if is_single else shard_map.parts(program))
        ]
    else:
        openers = [functools.partial(_open_in, shard) for shard in remote_shards]
    make = SingleFlashShard if is_single else ShardedFlashStore
    try:
        return make(
            program,
            folder,
            shard_map,
            openers,
            optimizer_of(config).roles,
            commit_rule(config),
            replicas=config.store.replicas,
            masks=masks,
        )
    except BudgetError as error:
        if config.store.holders == 1:
            raise
        raise BudgetError(
            f"{error}; the {count} shards{_with_replicas(config)} share store.dram and "
            "store.flash.size equally"
        ) from None


def _open_in(shard: RemoteShardStore, folder: Path) -> RemoteShardStore:
    """Make another process open a shard; that process has its own name for the folder."""
    return shard.open()


def make_flash_shard(
    config: Config,
    program: Program,
    holding: Holding,
    folder: Path,
    dram_bytes: int,
    masks: MaskRule | None = None,
) -> FlashStore:
    """Return the store in a folder on flash, of a whole program or of a shard's part of it."""
    size = config.store.flash.size
    return FlashStore(
        holding,
        folder,
        optimizer=optimizer_of(config),
        groups=_groups(config, program),
        rule=commit_rule(config),
        dram_bytes=dram_bytes,
        gradient_dtype=_FLOATS[config.gradient_precision],
        keep_steps=config.store.flash.keep_steps,
        durable_every=config.store.flash.durable_every,
        speculate=config.store.flash.speculate,
        flash_bytes=None if size is None else int(size) // config.store.holders,
        masks=masks,
    )


def flash_share(config: Config, program: Program, dram_bytes: int) -> int:
    """Return the memory of each shard and replica on flash, out of the memory for all of them.

    **Raises:** `BudgetError` if the share is too small.
    """
    count = config.store.shards
    least = least_flash_store_bytes(config, program)
    if config.store.holders > 1 and dram_bytes < least:
        raise BudgetError(
            f"store.dram: {program.name} in {count} shards{_with_replicas(config)} needs {least:,} "
            f"bytes of memory, the budget is {dram_bytes:,}; raise store.dram "
            f"(store.dram={size_above(least).replace(' ', '')}), or lower store.shards"
        )
    return (dram_bytes - assembly_of(config, program)) // config.store.holders


def _with_replicas(config: Config) -> str:
    return " with a replica each" if config.store.replicas > 1 else ""


def least_flash_store_bytes(config: Config, program: Program) -> int:
    """Return the least memory of a store on flash, all shards and replicas together."""
    half = config.gradient_precision == "bf16"
    optimizer, masks = optimizer_of(config), mask_rule_of(config, program)
    parts = _parts_of(config, program)
    largest = max(least_dram_bytes(part, optimizer, half, masks) for part in parts)
    # The remaining memory is shared equally.
    return config.store.holders * largest + assembly_of(config, program)


def dram_store_bytes(config: Config, program: Program) -> int:
    """Return the memory of a store in memory: masters, gradients, moments, masks."""
    gradient, optimizer = _FLOATS[config.gradient_precision].itemsize, optimizer_of(config)
    rule, shard_map = mask_rule_of(config, program), ShardMap.of(program, config.store.shards)
    parts = shard_map.parts(program) if is_in_parts(config, program) else [program]
    each = (dram_store_memory(part, optimizer, gradient, rule) for part in parts)
    once = sum(sum(memory.values()) for memory in each)
    return config.store.replicas * once + assembly_of(config, program)


def mask_change_bytes(config: Config, program: Program) -> int:
    """Return the part of the store's memory that only a step that changes masks takes."""
    rule, optimizer = mask_rule_of(config, program), optimizer_of(config)
    if rule is None:
        return 0
    parts = _parts_of(config, program)
    if config.store.flash.path is not None:
        return sum(flash_mask_change_bytes(part, optimizer, rule) for part in parts)
    return sum(passing_bytes(mask_memory(part, rule)) for part in parts)


def early_bytes(config: Config, program: Program, device: str) -> int:
    """Return the memory for weights that are streamed before their update to engines on `device`; 0
    where none are: `store.early_weights` says when."""
    is_alone = config.cluster.start == "none" and not is_in_parts(config, program)
    is_in_memory = config.store.flash.path is None
    has_own_memory = target_of(device).has_own_memory
    if not (config.store.early_weights and is_alone and is_in_memory and has_own_memory):
        return 0
    return early_weights_bytes(program, optimizer_of(config))


def _parts_of(config: Config, program: Program) -> Sequence[Holding]:
    """Return what each shard holds, of a store in shards or in one part."""
    shard_map = ShardMap.of(program, config.store.shards)
    if config.store.shards > 1:
        return list(shard_map.parts(program))
    return [shard_map.whole(program) if is_in_parts(config, program) else program]


def assembly_of(config: Config, program: Program) -> int:
    """Return the memory in which a sharded store assembles weights and masks; 0 without shards."""
    shard_map = ShardMap.of(program, config.store.shards)
    return Assembly.needed(program, shard_map) + whole_masks_bytes(program, shard_map)


def optimizer_of(config: Config) -> Optimizer:
    """Return the configured optimizer."""
    section = config.optimizer
    hyper: dict[str, Any] = {
        "adamw": {"beta1": section.betas[0], "beta2": section.betas[1], "epsilon": section.eps},
        "sgd": {"momentum": section.momentum, "nesterov": section.nesterov},
        "lion": {"beta1": section.betas[0], "beta2": section.betas[1]},
    }[section.name]
    return make_optimizer(section.name, **hyper, moments=section.moments)


def _groups(config: Config, program: Program) -> dict[str, GroupSettings]:
    section = config.optimizer
    groups = [
        Group(
            match=tuple(group.match),
            learning_rate_scale=group.learning_rate_scale,
            weight_decay=group.weight_decay,
        )
        for group in section.groups
    ]
    return assign_groups(
        {name: w.shape for name, w in program.weights.items() if w.trainable},
        groups,
        weight_decay=section.weight_decay,
        decay_1d=section.decay_1d,
        aliases={name: w.aliases for name, w in program.weights.items()},
    )


def commit_rule(config: Config) -> CommitRule:
    """Return the commit rule: the configured part of a step's decision, beside the gradients."""
    shape = config.optimizer.schedule
    schedule = Schedule(
        name=shape.name,
        peak=config.optimizer.learning_rate,
        decay_steps=config.decay_steps,
        warmup_steps=shape.warmup_steps,
        final_ratio=shape.final_ratio,
        power=shape.power,
        boundaries=tuple(shape.boundaries),
        ratios=tuple(shape.ratios),
    )
    return CommitRule(schedule, config.optimizer.clip_norm)
