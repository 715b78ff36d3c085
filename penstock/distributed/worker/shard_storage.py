"""A shard's store in a process of its own: opened when it is asked for, and again to go back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.config import Config
from penstock.distributed.protocol import GRADIENT_WIDTH
from penstock.distributed.rpc import WRITE_BYTES
from penstock.errors import ClusterError, StorageError
from penstock.planning import store_factory
from penstock.program import Program, largest_stage
from penstock.store import (
    ShardMap,
    Store,
)
from penstock.store.flash import FlashStore, forget, go_back, shard_folder


class OwnedShard:
    """The store of one shard in this process: in memory, or in a folder on this host's flash.

    Args:
        program: of the whole model.
        shard: which shard it is.
        store_bytes: what all shards together may take of memory.
        replica: which of those that hold the shard.
    """

    def __init__(
        self, config: Config, program: Program, shard: int, store_bytes: int, replica: int = 0
    ) -> None:
        self._config, self._program, self._shard = config, program, shard
        self._replica = replica
        self._store_bytes = store_bytes
        self._part = ShardMap.of(program, config.store.shards).part(program, shard)
        self._open: Store | None = None

    @property
    def most_bytes(self) -> int:
        """The most that a call can bring: a piece of a weight, or the gradients of a stage."""
        _, elements = largest_stage(self._part, lambda weight: weight.elements)
        return max(WRITE_BYTES, GRADIENT_WIDTH * elements)

    @property
    def store(self) -> Store:
        """The store.

        **Raises:** `StorageError` while it is shut.
        """
        if self._open is None:
            raise StorageError(f"shard {self._shard} of the store is shut")
        return self._open

    def open(self, must_hold: bool = False) -> Store:
        """Open it, new or as it was left.

        **Raises:** what the store raises, and `StorageError` if it must hold a step and does not.
        """
        self.close()
        config = self._config
        if config.store.flash.path is None:
            self._open = store_factory.make_dram_shard(config, self._program, self._part)
            return self._open
        folder = shard_folder(config.store.flash.path, self._shard, self._replica)
        if must_hold and not folder.exists():
            raise StorageError(
                f"{folder} is not on this host; start the worker where that shard's flash is, or "
                "put store.flash.path on a file system that all hosts share"
            )
        each = store_factory.flash_share(config, self._program, self._store_bytes)
        self._open = store_factory.make_flash_shard(config, self._program, self._part, folder, each)
        return self._open

    def open_empty(self) -> Store:
        """Open it without what it may have held before, to be given a copy.

        **Raises:** what the store raises.
        """
        self.close()
        flash = self._config.store.flash.path
        if flash is not None:
            forget(shard_folder(flash, self._shard, self._replica))
        return self.open()

    def close(self) -> None:
        """Let go of what is open; what is not durable yet is given up."""
        store, self._open = self._open, None
        if store is not None:
            store.close()

    def held_steps(self) -> Sequence[int]:
        """Return the steps that it can go back to: where it stands, and its durable ones."""
        store = self.store
        durable = store.durable_steps if isinstance(store, FlashStore) else []
        return sorted({*durable, store.step})

    def go_back(self, step: int) -> None:
        """Have it stand at one of them; what came after is forgotten, durably."""
        store = self.store
        if store.step == step or not isinstance(store, FlashStore):
            require_at(store, step)
            return
        self.close()
        go_back(store.folder, step)
        require_at(self.open(must_hold=True), step)


class ShardStorage(Protocol):
    """Where a shard's store is."""

    @property
    def store(self) -> Store: ...

    def held_steps(self) -> Sequence[int]:
        """Return the steps that it can go back to."""
        ...

    def go_back(self, step: int) -> None:
        """Have the store stand at one of them."""
        ...


class InProcessShard:
    """A shard's store in the trainer's process, with which it dies."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def held_steps(self) -> Sequence[int]:
        """Return the step at which the store stands."""
        return [self.store.step]

    def go_back(self, step: int) -> None:
        """Require that the store stands there."""
        require_at(self.store, step)


def require_at(store: Store, step: int) -> None:
    """Refuse to go on from a step at which a store does not stand."""
    if store.step != step:
        raise ClusterError(
            f"{store.program.name} stands at step {store.step} and cannot go back to step {step}; "
            "resume the run"
        )
