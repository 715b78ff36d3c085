"""A flash store in shards, each in its own folder; a step is durable when all shards have it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from penstock.store.commit import CommitRule
from penstock.store.flash.shards import (
    Shards,
    agree_on_step,
    require_no_journal,
    require_one_store,
    require_shards,
)
from penstock.store.holding import Holding
from penstock.store.interface import Store
from penstock.store.lock import FolderLock
from penstock.store.mask_rule import MaskRule
from penstock.store.roles import Role
from penstock.store.sharded import ShardedStore
from penstock.store.sharding import ShardMap


class DurableStore(Store, Protocol):
    """A store that is durable without checkpoints: on flash, in one part or in shards
    (`FlashStore`)."""

    @property
    def is_new(self) -> bool: ...

    @property
    def durable_step(self) -> int | None: ...

    @property
    def extra(self) -> Mapping[str, Any]: ...

    def make_durable(self) -> None: ...


class ShardedFlashStore(ShardedStore):
    """A `ShardedStore` on flash; it opens at the newest durable step that all shards hold.

    Each shard seals a step by itself. A commit waits for the previous step's seals in all shards,
    so no shard can seal the next step before all shards have sealed the present one. Shards are
    therefore never more than one durable step apart, and with `keep_steps` of 2 or more all shards
    share one.

    Args:
        program, shard_map, roles, rule, masks: as for `ShardedStore`.
        folder: the parent folder of the shards' folders.
        openers: for each shard, the function that opens its store in a given folder.
        replicas: number of folders of each shard that the openers open.

    Raises:
        OtherStoreError: the folder contains another number of shards, or the store of another
            model.
        CorruptionError: the shards belong to different stores, share no durable step, or replicas
            differ.
    """

    def __init__(
        self,
        program: Holding,
        folder: Path,
        shard_map: ShardMap,
        openers: Sequence[Callable[[Path], DurableStore]],
        roles: Sequence[Role],
        rule: CommitRule,
        replicas: int = 1,
        masks: MaskRule | None = None,
    ) -> None:
        self.folder = folder
        with ExitStack() as opened:
            shards = []
            for open_shard, where in zip(
                openers, self._folders(program, shard_map.count, replicas, opened), strict=True
            ):
                shards.append(open_shard(where))
                opened.callback(shards[-1].close)
            super().__init__(program, shard_map, shards, roles, rule, masks)
            self._on_flash = shards
            if not self.is_new:
                self.masks.resume()
            self._opened = opened.pop_all()

    def _folders(
        self, program: Holding, count: int, replicas: int, opened: ExitStack
    ) -> Sequence[Path]:
        """Return the folders of the shards, all at the step at which they open."""
        lock = FolderLock(self.folder, "store.flash.path")
        opened.callback(lock.release)
        found = require_shards(self.folder, count)
        if found is None:
            require_no_journal(self.folder)
            shapes = {name: spec.shape for name, spec in program.weights.items()}
            found = Shards.new(self.folder, count, shapes)
            found.write()
        require_one_store(found)
        agree_on_step(found, replicas)
        return found.folders

    @property
    def is_new(self) -> bool:
        """Whether the store has no durable step yet, so that weights must be loaded."""
        return any(shard.is_new for shard in self._on_flash)

    @property
    def durable_step(self) -> int | None:
        """The step that a restart after a crash would find; None before the first."""
        steps = [shard.durable_step for shard in self._on_flash]
        known = [step for step in steps if step is not None]
        return min(known) if len(known) == len(steps) else None

    @property
    def extra(self) -> Mapping[str, Any]:
        """The data kept with the present step."""
        return self._on_flash[0].extra

    def make_durable(self) -> None:
        """Return when the present step is durable."""
        self._require_whole()
        for shard in self._on_flash:
            shard.make_durable()

    def begin_restore(self) -> None:
        """Discard everything (`Store.begin_restore`); only while no step is durable.

        A crash between two shards would leave shards whose steps have the same number and different
        content.
        """
        if self.durable_step is not None:
            raise RuntimeError("a sharded store on flash is initialised once: use a new folder")
        super().begin_restore()

    def close(self) -> None:
        """Stop the threads and close the files; steps that are not durable yet are lost."""
        self._opened.close()


class SingleFlashShard(ShardedFlashStore):
    """A `ShardedFlashStore` of one shard, in the folder and the files of a store without shards.

    Engines in other processes need it for sparse weights: the run, not the shard, decides on the
    masks. The same folder can be opened as a `FlashStore`.
    """

    def _folders(
        self, program: Holding, count: int, replicas: int, opened: ExitStack
    ) -> Sequence[Path]:
        require_shards(self.folder, 1)
        return [self.folder]
