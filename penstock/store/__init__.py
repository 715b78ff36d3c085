"""The store owns every weight and all optimizer state: what must survive, and nothing else does."""

from penstock.store.checkpoint import (
    CheckpointState,
    SavedCheckpoint,
    checkpoint_weights,
    find_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
    verify_checkpoint,
)
from penstock.store.dram import DramStore
from penstock.store.huggingface import export_huggingface
from penstock.store.interface import Commit, Store, Traffic

__all__ = [
    "CheckpointState",
    "Commit",
    "DramStore",
    "SavedCheckpoint",
    "Store",
    "Traffic",
    "checkpoint_weights",
    "export_huggingface",
    "find_checkpoint",
    "load_checkpoint",
    "read_state",
    "save_checkpoint",
    "verify_checkpoint",
]
