"""A store on flash in shards, each in a folder of its own, durable together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from penstock.store.commit import CommitRule
from penstock.store.flash.shards import Shards, agree, require_one_store, require_shards
from penstock.store.holding import Holding
from penstock.store.interface import Store
from penstock.store.lock import FolderLock
from penstock.store.roles import Role
from penstock.store.sharded import ShardedStore
from penstock.store.sharding import ShardMap


class DurableStore(Store, Protocol):
    """A store that survives by itself: on flash, whole or in shards (`FlashStore`)."""

    @property
    def is_new(self) -> bool: ...

    @property
    def durable_step(self) -> int | None: ...

    @property
    def extra(self) -> Mapping[str, Any]: ...

    def make_durable(self) -> None: ...


class ShardedFlashStore(ShardedStore):
    """A `ShardedStore` on flash; it opens at the newest durable step that all shards hold.

    A step is sealed in every shard by itself. No shard can seal the next before all have sealed
    it, since a commit waits for the seals before it in all of them: shards are never more than one
    durable step apart, and with `keep_steps` of 2 or more there is one that all hold.

    Args:
        program, shard_map, roles, rule: as for `ShardedStore`.
        folder: where the shards' folders are, or are to be.
        openers: for each shard, what opens its store, given the folder that it is in.
        replicas: how many folders of each shard they open.

    Raises:
        OtherStoreError: the folder holds another number of shards, or the store of another model.
        CorruptionError: the shards are of different stores, hold no durable step in common, or
            replicas differ.
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
    ) -> None:
        self.folder = folder
        with ExitStack() as opened:
            lock = FolderLock(folder, "store.flash.path")
            opened.callback(lock.release)
            found = require_shards(folder, shard_map.count)
            if found is None:
                shapes = {name: spec.shape for name, spec in program.weights.items()}
                found = Shards.new(folder, shard_map.count, shapes)
                found.write()
            require_one_store(found)
            agree(found, replicas)
            shards = []
            for open_shard, where in zip(openers, found.folders, strict=True):
                shards.append(open_shard(where))
                opened.callback(shards[-1].close)
            super().__init__(program, shard_map, shards, roles, rule)
            self._on_flash = shards
            self._opened = opened.pop_all()

    @property
    def is_new(self) -> bool:
        """Whether it holds no durable step yet, so that weights must be loaded."""
        return any(shard.is_new for shard in self._on_flash)

    @property
    def durable_step(self) -> int | None:
        """The step that would be found after a crash now; None before the first."""
        steps = [shard.durable_step for shard in self._on_flash]
        known = [step for step in steps if step is not None]
        return min(known) if len(known) == len(steps) else None

    @property
    def extra(self) -> Mapping[str, Any]:
        """What was kept with the present step."""
        return self._on_flash[0].extra

    def make_durable(self) -> None:
        """Return when the present step would be found after a crash."""
        self._require_whole()
        for shard in self._on_flash:
            shard.make_durable()

    def begin_restore(self) -> None:
        """Forget everything (`Store.begin_restore`); only while nothing is durable yet.

        A crash between two shards would leave them at steps that have the same number only.
        """
        if self.durable_step is not None:
            raise RuntimeError("a store in shards on flash is filled once: use a new folder")
        super().begin_restore()

    def close(self) -> None:
        """Stop the threads and let go of the files; what is not durable yet is given up."""
        self._opened.close()
