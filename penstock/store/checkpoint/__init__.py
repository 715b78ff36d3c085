"""Checkpoints of a store: saved so that no crash can spoil them, checked before they are used."""

from penstock.store.checkpoint.background import BackgroundSave
from penstock.store.checkpoint.index import find_checkpoint
from penstock.store.checkpoint.load import (
    checkpoint_folders,
    checkpoint_hash,
    load_checkpoint,
    verify_checkpoint,
)
from penstock.store.checkpoint.reader import SavedWeights
from penstock.store.checkpoint.save import SavedCheckpoint, save_checkpoint
from penstock.store.checkpoint.state import CheckpointState, read_state

__all__ = [
    "BackgroundSave",
    "CheckpointState",
    "SavedCheckpoint",
    "SavedWeights",
    "checkpoint_folders",
    "checkpoint_hash",
    "find_checkpoint",
    "load_checkpoint",
    "read_state",
    "save_checkpoint",
    "verify_checkpoint",
]
