"""The store of a shard in its own process: opened on request, and opened again for a rollback."""

from collections.abc import Sequence
from typing import Protocol

from penstock.config import Config
from penstock.distributed.protocol import GRADIENT_WIDTH
from penstock.distributed.rpc.rpc import WRITE_BYTES
from penstock.errors import ClusterError, StorageError, UnfitHostError
from penstock.planning import mask_rule_of, store_factory
from penstock.program import Program, largest_stage
from penstock.spans import Spans
from penstock.store import (
    ShardMap,
    Store,
)
from penstock.store.flash import FlashStore, durable_records, forget, go_back, shard_folder


class OwnedShard:
    """The store of one shard in this process: in memory, or in a folder on this host's flash.

    Args:
        program: of the whole model.
        shard: the number of the shard.
        store_bytes: the memory limit of all shards together.
        replica: the number of the replica.
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
        """The largest RPC body: a piece of a weight, or the gradients of a stage."""
        _, elements = largest_stage(self._part, lambda weight: weight.elements)
        return max(WRITE_BYTES, GRADIENT_WIDTH * elements)

    @property
    def store(self) -> Store:
        """The open store.

        **Raises:** `StorageError` while the store is closed.
        """
        if self._open is None:
            raise StorageError(f"shard {self._shard} of the store is closed")
        return self._open

    def open(self, must_hold: bool = False) -> Store:
        """Open the store, new or with its previous content.

        **Raises:** the errors of the store, and `UnfitHostError` if `must_hold` is set and this
        host has no durable step of the store.
        """
        self.close()
        config, masks = self._config, mask_rule_of(self._config, self._program)
        if config.store.flash.path is None:
            self._open = store_factory.make_dram_shard(config, self._program, self._part, masks)
            return self._open
        folder = shard_folder(config.store.flash.path, self._shard, self._replica)
        if must_hold and not durable_records(folder):
            raise UnfitHostError(
                f"{folder}: this host has no durable step of the shard; start the worker where "
                "that shard's flash is, or put store.flash.path on a file system that all hosts "
                "share"
            )
        each = store_factory.flash_share(config, self._program, self._store_bytes)
        self._open = store_factory.make_flash_shard(
            config, self._program, self._part, folder, each, masks
        )
        return self._open

    def open_empty(self) -> Store:
        """Open the store without its previous content, to receive a snapshot.

        **Raises:** the errors of the store.
        """
        self.close()
        flash = self._config.store.flash.path
        if flash is not None:
            forget(shard_folder(flash, self._shard, self._replica))
        return self.open()

    def close(self) -> None:
        """Close the store; discard the state that is not durable yet."""
        store, self._open = self._open, None
        if store is not None:
            store.close()

    @property
    def spans(self) -> Sequence[Spans]:
        """The measurements of the store, if it is open."""
        store = self._open  # read once: another thread may close the store
        return () if store is None else store.spans

    def held_steps(self) -> Sequence[int]:
        """Return the steps to which the store can roll back: the current step and durable steps."""
        store = self.store
        durable = store.durable_steps if isinstance(store, FlashStore) else []
        return sorted({*durable, store.step})

    def roll_back(self, step: int) -> None:
        """Roll back to one of the held steps; later steps are discarded durably."""
        store = self.store
        if store.step == step or not isinstance(store, FlashStore):
            require_at(store, step)
            return
        self.close()
        go_back(store.folder, step)
        require_at(self.open(must_hold=True), step)


class ShardStorage(Protocol):
    """The store of a shard, wherever it is: what the step protocol needs of it."""

    @property
    def store(self) -> Store: ...

    @property
    def spans(self) -> Sequence[Spans]:
        """The measurements of the store, if it is open."""
        ...

    def held_steps(self) -> Sequence[int]:
        """Return the steps to which the store can roll back."""
        ...

    def roll_back(self, step: int) -> None:
        """Roll the store back to one of the held steps."""
        ...


class InProcessShard:
    """The store of a shard in the trainer's process; ends with this process."""

    def __init__(self, store: Store) -> None:
        self.store, self.spans = store, store.spans

    def held_steps(self) -> Sequence[int]:
        """Return the current step of the store."""
        return [self.store.step]

    def roll_back(self, step: int) -> None:
        """Require that the store is at this step."""
        require_at(self.store, step)


def require_at(store: Store, step: int) -> None:
    """Raise an error unless the store is at this step."""
    if store.step != step:
        raise ClusterError(
            f"{store.program.name} is at step {store.step} and cannot roll back to step {step}; "
            "resume the run"
        )
