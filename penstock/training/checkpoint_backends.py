"""The two checkpoint back ends of training: checkpoints of a store in memory, and the flash tier.

Both have one interface for the trainer: report the saved state, return a store at the step where
the run stopped, and make the current step durable. `make_checkpoint_backend` decides which state
of a run is opened, for training and for every use of a trained model.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from penstock.config import Config, recorded_flash, trajectory
from penstock.engine import target_of
from penstock.errors import ConfigError
from penstock.io import file_in_place
from penstock.models import ModelSource
from penstock.planning import ExecutionPlan, store_factory
from penstock.store import (
    BackgroundSave,
    Base,
    BaseNotes,
    MaskRule,
    MemoryStore,
    SavedCheckpoint,
    Store,
    WeightReader,
    find_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from penstock.store.flash import (
    DurableStore,
    OtherStoreError,
    discard_untrained,
    holds_store,
    open_reader,
    recorded_bfloat16,
    recorded_extra,
)
from penstock.training.best_checkpoint import BestCheckpoint, nothing_trained, saved_weights
from penstock.training.resume_state import ResumeState

Notice = Callable[[str], None]


class CheckpointBackend(Protocol):
    """Loads and saves the state of a run."""

    @property
    def recorded(self) -> ResumeState | None:
        """The trainer's record of the newest saved step; None if there is none."""
        ...

    @property
    def bfloat16(self) -> frozenset[str] | None:
        """The frozen weights that the run stores as bfloat16; None for a new run."""
        ...

    @property
    def needs_base(self) -> bool:
        """Whether frozen weights must be read again from the folder that the run started from."""
        ...

    @property
    def newest_step(self) -> int | None:
        """The newest step that a resumed run would find now."""
        ...

    def open(
        self,
        model: ModelSource,
        layout: ExecutionPlan,
        device: str,
        notice: Notice,
        remote_shards: Sequence[store_factory.RemoteShardStore] | None = None,
    ) -> Store:
        """Return a store with the state of the newest step, or with initial weights.

        The shards are in this process, or in other processes if `remote_shards` is given.
        """
        ...

    def reader(self, only_trained: bool) -> AbstractContextManager[WeightReader]:
        """Open the saved weights without a store.

        With `only_trained`, frozen weights may be unavailable.
        """
        ...

    def begin_save(self, extra: Mapping[str, Any], best: bool) -> None:
        """Start to make the current step durable while the run continues."""
        ...

    def poll(self) -> SavedCheckpoint | None:
        """Return a checkpoint that has become complete, once; raise its error if it failed."""
        ...

    def finish(self) -> SavedCheckpoint | None:
        """Wait for the started checkpoint and return it, or raise its error; as `poll`."""
        ...

    def abandon(self) -> None:
        """Discard an incomplete checkpoint; keep complete ones."""
        ...


class FileCheckpoints:
    """A store in memory, saved as safetensors under `run.dir/checkpoints`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._folder = config.run.dir / "checkpoints"
        self._latest = find_checkpoint(self._folder, "latest")
        found = read_state(self._latest) if self._latest else None
        self.recorded = (
            ResumeState.read(found.extra, self._latest) if found and self._latest else None
        )
        self.bfloat16 = found.bfloat16 if found else None
        self._base = found.base if found else None
        self.needs_base = self._base is not None
        self._store: Store | None = None
        self._saving: BackgroundSave | None = None
        self._saved: SavedCheckpoint | None = None

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint."""
        latest = find_checkpoint(self._folder, "latest")
        return read_state(latest).step if latest else None

    def open(
        self,
        model: ModelSource,
        layout: ExecutionPlan,
        device: str,
        notice: Notice,
        remote_shards: Sequence[store_factory.RemoteShardStore] | None = None,
    ) -> Store:
        """Return a store in memory."""
        program, masks = layout.program, _mask_rule(self._config, model, layout)
        self._store = store_factory.make_store(
            self._config,
            program,
            device,
            notice,
            remote_shards,
            masks,
            streams_early=layout.shares.early > 0,
        )
        read = functools.partial(model.initial_weights, self._config.run.seed)
        if self._latest is None:
            self._begin(self._store, model, read(list(program.weights)))
            return self._store
        if self._base is not None:
            self._base.require(model.weights_fingerprint(), model.weights_folder or model.name)
        load_checkpoint(self._store, self._latest, base=read)
        return self._store

    def _begin(
        self, store: Store, model: ModelSource, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Load initial weights; record the weights that checkpoints may omit."""
        fingerprint, specs = model.weights_fingerprint(), store.program.weights
        based = {n: w for n, w in specs.items() if n in model.folder_weights and not w.trainable}
        if fingerprint is None or not based:
            store.load(weights)
            return
        notes = BaseNotes(fingerprint, based)
        store.load(notes.passing(weights))
        self._base = notes.base

    @contextmanager
    def reader(self, only_trained: bool) -> Iterator[WeightReader]:
        """Open the weights of the newest checkpoint."""
        if self._latest is None:
            raise nothing_trained(self._config)
        yield saved_weights(self._config, self._latest, only_trained)

    def begin_save(self, extra: Mapping[str, Any], best: bool) -> None:
        """Start to write a checkpoint; at most one is written at a time.

        If shards are in other processes, the checkpoint is written at once while the run waits.
        """
        assert self._store is not None
        assert self._saving is None
        section = self._config.checkpoint
        if not isinstance(self._store, MemoryStore):
            self._saved = save_checkpoint(
                self._store,
                self._folder,
                dict(extra),
                best=best,
                keep_last=section.keep_last,
                base=self._base,
            )
            return
        self._saving = BackgroundSave(
            self._store.snapshot(int(section.buffer)),
            self._folder,
            dict(extra),
            best=best,
            keep_last=section.keep_last,
            base=self._base,
        )

    def poll(self) -> SavedCheckpoint | None:
        """Return the checkpoint that has become complete."""
        if self._saving is not None and not self._saving.is_done:
            return None
        return self.finish()

    def finish(self) -> SavedCheckpoint | None:
        """Apply the updates that the writer waits for, and wait for the writer."""
        if self._saving is None:
            saved, self._saved = self._saved, None
            return saved
        assert self._store is not None
        self._store.flush()
        try:
            return self._saving.wait()
        finally:
            if self._saving.is_done:  # else the wait was interrupted, and `abandon` may follow
                self._saving = None

    def abandon(self) -> None:
        """Stop the writer, and return when its thread has ended."""
        if self._saving is not None:
            self._saving.abandon()
            self._saving = None


def require_own_store(config: Config, recorded: ResumeState | None) -> None:
    """Refuse to train the store on flash of another run; a run and its store may be moved or
    copied.

    **Raises:** `ConfigError` if the store lies where the other run had it, and that run is there.
    """
    folders = flash_folders(config)
    if recorded is None or recorded.run_dir is None or recorded.flash_dir != folders["flash_dir"]:
        return
    other = Path(recorded.run_dir)
    try:
        is_there = (other / "config.yaml").is_file()
        is_own = is_there and config.run.dir.exists() and config.run.dir.samefile(other)
    except OSError:  # a folder of somebody else
        return
    if is_there and not is_own:
        raise ConfigError(
            f"store.flash.path: {config.store.flash.path} holds the weights of another run, "
            f"{other}; choose another folder for {config.run.dir}, or set run.dir to {other} to "
            "train that run further"
        )


def flash_folders(config: Config) -> dict[str, Any]:
    """Return the folders of a run and of its store on flash as the store records them."""
    flash = config.store.flash.path
    if flash is None:
        return {"run_dir": None, "flash_dir": None}
    return {"run_dir": os.path.realpath(config.run.dir), "flash_dir": os.path.realpath(flash)}


class FlashCheckpoints:
    """A store on flash, durable by itself; only the best step is also saved as safetensors."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._found = recorded_extra(folder)
        self.recorded = (
            ResumeState.read(self._found, folder)
            if self._found and "trajectory" in self._found
            else None
        )
        self.bfloat16 = None if self.recorded is None else recorded_bfloat16(folder)
        self.needs_base = False  # the store holds all weights
        self._model: ModelSource | None = None
        self._store: DurableStore | None = None
        self._saved: SavedCheckpoint | None = None

    @property
    def newest_step(self) -> int | None:
        """The newest durable step; only this process writes while the store is open."""
        return self._store.durable_step if self._store else None

    def open(
        self,
        model: ModelSource,
        layout: ExecutionPlan,
        device: str,
        notice: Notice,
        remote_shards: Sequence[store_factory.RemoteShardStore] | None = None,
    ) -> Store:
        """Return the store on flash; new weights are written there one at a time.

        Untrained weights on flash are used only if this run would start from the same weights.
        Otherwise the weights are loaded again.
        """
        self._model = model
        if self.recorded is not None:
            self._store = self._make_store(model, layout, remote_shards)
        else:
            self._store = self._open_untrained(model, layout, notice, remote_shards)
        try:
            if target_of(device).has_own_memory:
                self._store.page_lock()
            if self._store.is_new:
                seed = self._config.run.seed
                self._store.load(model.initial_weights(seed, list(layout.program.weights)))
        except BaseException:
            self._store.close()
            raise
        return self._store

    def _make_store(
        self,
        model: ModelSource,
        layout: ExecutionPlan,
        remote_shards: Sequence[store_factory.RemoteShardStore] | None,
    ) -> DurableStore:
        return store_factory.make_flash_store(
            self._config,
            layout.program,
            layout.shares.store,
            self._folder,
            remote_shards,
            _mask_rule(self._config, model, layout),
        )

    def _open_untrained(
        self,
        model: ModelSource,
        layout: ExecutionPlan,
        notice: Notice,
        remote_shards: Sequence[store_factory.RemoteShardStore] | None,
    ) -> DurableStore:
        """Return a store at step 0: a new one, or one with the initial weights."""
        found, start = self._found or {}, _start(self._config, model)
        if None not in (known := {found.get("weights"), start["weights"]}) and len(known) > 1:
            raise ConfigError(
                f"{self._folder} holds untrained weights of another checkpoint than "
                f"{model.folder}; delete the folder, or choose another store.flash.path"
            )
        try:
            store = self._make_store(model, layout, remote_shards)
        except OtherStoreError:
            is_usable = False
        else:
            is_usable = store.is_new or found == start
            if not is_usable:
                store.close()
        if not is_usable:
            notice(
                f"{self._folder} holds untrained weights that differ from the initial weights of "
                "this run: the initial weights are loaded again"
            )
            discard_untrained(self._folder)
            store = self._make_store(model, layout, remote_shards)
        store.remember(start)  # durable with the weights, before any step
        return store

    @contextmanager
    def reader(self, only_trained: bool) -> Iterator[WeightReader]:
        """Open the weights of the newest durable step; the store holds all of them."""
        with open_reader(self._folder) as reader:
            if not reader.steps:
                raise ConfigError(
                    f"{self._folder}: no durable step yet, so there is nothing to export"
                )
            yield reader

    def begin_save(self, extra: Mapping[str, Any], best: bool) -> None:
        """Wait until the current step is durable; also write the best step as safetensors.

        `extra` is durable only after the checkpoint of the best step: a run that was killed, or
        whose disk was full, evaluates the step again.
        """
        assert self._store is not None
        try:
            if best:
                folder = self._config.run.dir / "checkpoints"
                self._saved = save_checkpoint(
                    self._store, folder, dict(extra), best=True, keep_last=1, base=self._base
                )
            self._store.remember(extra)
        finally:
            self._store.make_durable()

    @functools.cached_property
    def _base(self) -> Base | None:
        """The base weights that the best checkpoint omits, although the store holds them."""
        store, model = self._store, self._model
        assert store is not None
        assert model is not None
        known = self.recorded.weights if self.recorded else model.weights_fingerprint()
        specs = store.program.weights
        frozen = [n for n, w in specs.items() if not w.trainable and n not in model.adapter_weights]
        return Base.held_by(store, known, frozen) if known is not None and frozen else None

    def poll(self) -> SavedCheckpoint | None:
        """Return the best checkpoint that was written."""
        saved, self._saved = self._saved, None
        return saved

    def finish(self) -> SavedCheckpoint | None:
        """Return None: no checkpoint is pending here."""
        return self.poll()

    def abandon(self) -> None:
        """Do nothing: no checkpoint is pending here."""


def _mask_rule(config: Config, model: ModelSource, layout: ExecutionPlan) -> MaskRule | None:
    """Return the rule of a run's masks; None if no weight is sparse."""
    return None if layout.sparse is None else layout.sparse.mask_rule(model, config.run.seed)


def _start(config: Config, model: ModelSource) -> dict[str, Any]:
    """Return the settings that decide a run's initial weights, in the form that JSON returns."""
    deciding = {
        key: value
        for key, value in trajectory(config).items()
        if key.split(".")[0] in ("model", "lora", "sparsity") or key == "run.seed"
    }
    start = {
        "weights": model.weights_fingerprint(),
        "values": model.values_fingerprint(),
        "start": deciding,
    }
    return dict(json.loads(json.dumps(start)))


def make_checkpoint_backend(config: Config, best: bool = False) -> CheckpointBackend:
    """Return the checkpoint back end of a configuration, which opens the newest state of the run.

    With `best`, the back end opens the checkpoint with the lowest held-out loss, and does not
    train.

    **Raises:** `ConfigError` if the run has state in the other back end: the run would silently
    start again. Or if there is no best checkpoint.
    """
    if best:
        return BestCheckpoint(config, lambda: make_checkpoint_backend(config).recorded)
    flash, before = config.store.flash.path, recorded_flash(config.run.dir)
    if flash is not None and (file := file_in_place(flash)) is not None:
        raise ConfigError(
            f"store.flash.path: expected a folder, got the file {file}; choose another path"
        )
    checkpoints = FileCheckpoints(config) if flash is None else FlashCheckpoints(config, flash)
    if before is not None and not _is_same(before, flash):
        if flash is None or checkpoints.recorded is None:
            raise ConfigError(
                f"store.flash.path: expected {before}, where {config.run.dir} has its state, got "
                f"{flash or 'null'}; set it back, move the folder there, or choose another run.dir"
            )
    elif before is not None and not holds_store(before):
        raise ConfigError(
            f"store.flash.path: {before} holds no store, and {config.run.dir} had its state there; "
            "check that its disk is mounted, or choose another run.dir to start a new run"
        )
    elif flash is not None and checkpoints.recorded is None:
        _require_place(config, flash)
    return checkpoints


def _require_place(config: Config, flash: Path) -> None:
    """Refuse a new flash store if the run has checkpoints, or the folder's disk seems unmounted."""
    saved = find_checkpoint(config.run.dir / "checkpoints", "latest")
    if saved is not None:
        raise ConfigError(
            f"store.flash.path: {config.run.dir} has its state in {saved} and none in {flash}; "
            "remove store.flash.path to continue, or choose another run.dir"
        )
    # Creating the folder would fill this disk instead of a disk that is not mounted yet.
    above, run = flash.parent, config.run.dir.absolute()
    if flash.is_absolute() and not above.exists() and not flash.is_relative_to(run):
        raise ConfigError(
            f"store.flash.path: {above} does not exist; check that its disk is mounted, or create "
            "the folder"
        )


def _is_same(one: Path, other: Path | None) -> bool:
    return other is not None and one.absolute() == other.absolute()
