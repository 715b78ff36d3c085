"""Checkpoints of a store: atomic under crashes, and verified before use."""

from penstock.store.checkpoint.background import BackgroundSave as BackgroundSave
from penstock.store.checkpoint.base import (
    Base as Base,
    BaseNotes as BaseNotes,
    ReadBase as ReadBase,
)
from penstock.store.checkpoint.index import find_checkpoint as find_checkpoint
from penstock.store.checkpoint.load import (
    checkpoint_folders as checkpoint_folders,
    load_checkpoint as load_checkpoint,
    verify_checkpoint as verify_checkpoint,
)
from penstock.store.checkpoint.reader import (
    SavedWeights as SavedWeights,
    checkpoint_hash as checkpoint_hash,
)
from penstock.store.checkpoint.repair import (
    RepairedCheckpoints as RepairedCheckpoints,
    repair_checkpoints as repair_checkpoints,
)
from penstock.store.checkpoint.save import (
    SavedCheckpoint as SavedCheckpoint,
    checkpoint_bytes as checkpoint_bytes,
    save_checkpoint as save_checkpoint,
)
from penstock.store.checkpoint.state import (
    CheckpointState as CheckpointState,
    read_state as read_state,
)
