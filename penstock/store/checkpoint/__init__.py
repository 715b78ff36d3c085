"""Checkpoints of a store: atomic under crashes, and verified before use."""

from penstock.store.checkpoint.background import BackgroundSave
from penstock.store.checkpoint.base import Base, BaseNotes, ReadBase
from penstock.store.checkpoint.index import find_checkpoint
from penstock.store.checkpoint.load import (
    checkpoint_folders,
    load_checkpoint,
    verify_checkpoint,
)
from penstock.store.checkpoint.reader import SavedWeights, checkpoint_hash
from penstock.store.checkpoint.save import SavedCheckpoint, checkpoint_bytes, save_checkpoint
from penstock.store.checkpoint.state import CheckpointState, read_state

__all__ = [
    "BackgroundSave",
    "Base",
    "BaseNotes",
    "CheckpointState",
    "ReadBase",
    "SavedCheckpoint",
    "SavedWeights",
    "checkpoint_bytes",
    "checkpoint_folders",
    "checkpoint_hash",
    "find_checkpoint",
    "load_checkpoint",
    "read_state",
    "save_checkpoint",
    "verify_checkpoint",
]
