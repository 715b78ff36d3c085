"""The store owns every weight and all optimizer state. No other part keeps state across steps."""

from penstock.store.adapters import MergedWeights, export_adapters
from penstock.store.checkpoint import (
    BackgroundSave,
    Base,
    BaseNotes,
    CheckpointState,
    ReadBase,
    SavedCheckpoint,
    SavedWeights,
    checkpoint_bytes,
    checkpoint_folders,
    checkpoint_hash,
    find_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
    verify_checkpoint,
)
from penstock.store.commit import CommitRule, commit_by
from penstock.store.comparing import Compared
from penstock.store.dram import DramStore
from penstock.store.gradients import Gradients, trainable_weights
from penstock.store.holding import HeldPart, Holding, PartStage
from penstock.store.huggingface_export import MAX_SHARD_BYTES, export_huggingface
from penstock.store.incoming import fill
from penstock.store.interface import (
    Commit,
    Decision,
    FlashTraffic,
    MemoryStore,
    Store,
    Traffic,
    WeightReader,
    kept_entries,
)
from penstock.store.learning_rate_schedules import Schedule, learning_rate
from penstock.store.lock import FolderLock
from penstock.store.mask_plan import MaskPlan, OpenSelection, SelectionRounds
from penstock.store.mask_rule import InitialMask, MaskRule
from penstock.store.memory_account import dram_store_memory
from penstock.store.norm import GradientReport, merged
from penstock.store.optimizers import (
    OPTIMIZER_NAMES,
    SGD,
    AdamW,
    Group,
    GroupSettings,
    Lion,
    Optimizer,
    assign_groups,
    make_optimizer,
)
from penstock.store.packed import index_memory
from penstock.store.packed_export import export_packed, mask_of
from penstock.store.portions import Portions, ReplicatedStore, portions_of
from penstock.store.roles import CHANGES, INDEX, MASTER, VALUES, Role, Stored, holds_weight
from penstock.store.sharded import Assembly, ShardedStore
from penstock.store.sharded_dram import ShardedDramStore
from penstock.store.sharded_masks import (
    HeldSparseShard,
    ShardedMasks,
    sparse_shard,
    whole_masks_bytes,
)
from penstock.store.sharding import ShardMap

__all__ = [
    "CHANGES",
    "INDEX",
    "MASTER",
    "MAX_SHARD_BYTES",
    "OPTIMIZER_NAMES",
    "SGD",
    "VALUES",
    "AdamW",
    "Assembly",
    "BackgroundSave",
    "Base",
    "BaseNotes",
    "CheckpointState",
    "Commit",
    "CommitRule",
    "Compared",
    "Decision",
    "DramStore",
    "FlashTraffic",
    "FolderLock",
    "GradientReport",
    "Gradients",
    "Group",
    "GroupSettings",
    "HeldPart",
    "HeldSparseShard",
    "Holding",
    "InitialMask",
    "Lion",
    "MaskPlan",
    "MaskRule",
    "MemoryStore",
    "MergedWeights",
    "OpenSelection",
    "Optimizer",
    "PartStage",
    "Portions",
    "ReadBase",
    "ReplicatedStore",
    "Role",
    "SavedCheckpoint",
    "SavedWeights",
    "Schedule",
    "SelectionRounds",
    "ShardMap",
    "ShardedDramStore",
    "ShardedMasks",
    "ShardedStore",
    "Store",
    "Stored",
    "Traffic",
    "WeightReader",
    "assign_groups",
    "checkpoint_bytes",
    "checkpoint_folders",
    "checkpoint_hash",
    "commit_by",
    "dram_store_memory",
    "export_adapters",
    "export_huggingface",
    "export_packed",
    "fill",
    "find_checkpoint",
    "holds_weight",
    "index_memory",
    "kept_entries",
    "learning_rate",
    "load_checkpoint",
    "make_optimizer",
    "mask_of",
    "merged",
    "portions_of",
    "read_state",
    "save_checkpoint",
    "sparse_shard",
    "trainable_weights",
    "verify_checkpoint",
    "whole_masks_bytes",
]
