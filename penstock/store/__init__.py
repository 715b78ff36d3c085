"""The store owns every weight and all optimizer state. No other part keeps state across steps.

A name is imported at first use: commands that only plan need few of these modules.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.store.adapters import (
        MergedWeights as MergedWeights,
        export_adapters as export_adapters,
    )
    from penstock.store.checkpoint import (
        BackgroundSave as BackgroundSave,
        Base as Base,
        BaseNotes as BaseNotes,
        CheckpointState as CheckpointState,
        ReadBase as ReadBase,
        SavedCheckpoint as SavedCheckpoint,
        SavedWeights as SavedWeights,
        checkpoint_bytes as checkpoint_bytes,
        checkpoint_folders as checkpoint_folders,
        checkpoint_hash as checkpoint_hash,
        find_checkpoint as find_checkpoint,
        load_checkpoint as load_checkpoint,
        read_state as read_state,
        repair_checkpoints as repair_checkpoints,
        save_checkpoint as save_checkpoint,
        verify_checkpoint as verify_checkpoint,
    )
    from penstock.store.commit import CommitRule as CommitRule, commit_by as commit_by
    from penstock.store.comparing import Compared as Compared
    from penstock.store.dram import DramStore as DramStore
    from penstock.store.early_weights import early_weights_bytes as early_weights_bytes
    from penstock.store.files import free_bytes as free_bytes
    from penstock.store.gradients import (
        Gradients as Gradients,
        trainable_weights as trainable_weights,
    )
    from penstock.store.holding import (
        HeldPart as HeldPart,
        Holding as Holding,
        PartStage as PartStage,
    )
    from penstock.store.huggingface_export import (
        MAX_SHARD_BYTES as MAX_SHARD_BYTES,
        export_huggingface as export_huggingface,
    )
    from penstock.store.incoming import fill as fill
    from penstock.store.interface import (
        Commit as Commit,
        Decision as Decision,
        DefersUpdates as DefersUpdates,
        FlashTraffic as FlashTraffic,
        MemoryStore as MemoryStore,
        Store as Store,
        Traffic as Traffic,
        UpdateTimes as UpdateTimes,
        WeightReader as WeightReader,
        kept_entries as kept_entries,
    )
    from penstock.store.learning_rate_schedules import (
        Schedule as Schedule,
        learning_rate as learning_rate,
    )
    from penstock.store.lock import FolderLock as FolderLock
    from penstock.store.mask_plan import (
        OpenSelection as OpenSelection,
        SelectionRounds as SelectionRounds,
    )
    from penstock.store.mask_rule import (
        InitialMask as InitialMask,
        MaskRule as MaskRule,
        mask_memory as mask_memory,
        passing_bytes as passing_bytes,
    )
    from penstock.store.memory_account import dram_store_memory as dram_store_memory
    from penstock.store.norm import GradientReport as GradientReport, merged as merged
    from penstock.store.optimizers import (
        SGD as SGD,
        AdamW as AdamW,
        Group as Group,
        GroupSettings as GroupSettings,
        Lion as Lion,
        Optimizer as Optimizer,
        assign_groups as assign_groups,
        make_optimizer as make_optimizer,
    )
    from penstock.store.packed import index_memory as index_memory, room_of as room_of
    from penstock.store.packed_export import export_packed as export_packed
    from penstock.store.portions import (
        Portions as Portions,
        ReplicatedStore as ReplicatedStore,
        portions_of as portions_of,
    )
    from penstock.store.roles import (
        CHANGES as CHANGES,
        INDEX as INDEX,
        MASTER as MASTER,
        VALUES as VALUES,
        Role as Role,
        Stored as Stored,
        holds_weight as holds_weight,
    )
    from penstock.store.sharded import Assembly as Assembly, ShardedStore as ShardedStore
    from penstock.store.sharded_dram import ShardedDramStore as ShardedDramStore
    from penstock.store.sharded_masks import (
        HeldSparseShard as HeldSparseShard,
        ShardedMasks as ShardedMasks,
        sparse_shard as sparse_shard,
        whole_masks_bytes as whole_masks_bytes,
    )
    from penstock.store.sharding import ShardMap as ShardMap

__getattr__ = lazily(__name__, __file__)
