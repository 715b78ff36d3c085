"""The checkpoint with the lowest held-out loss, opened for evaluation, generation and export.

The best checkpoint is in `run.dir/checkpoints` for every kind of store: a store on flash keeps only
its newest steps. It is opened without the newest state, which may be on another disk.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.errors import ConfigError, PenstockError
from penstock.models import ModelSource
from penstock.planning import ExecutionPlan, model_sources, store_factory
from penstock.store import (
    SavedCheckpoint,
    SavedWeights,
    Store,
    WeightReader,
    find_checkpoint,
    read_state,
)
from penstock.training.read_only_store import ReadOnlyStore, no_training
from penstock.training.resume_state import ResumeState

Recorded = Callable[[], ResumeState | None]


class BestCheckpoint:
    """The back end of a trainer that does not train; the interface is `CheckpointBackend`.

    **Arguments:** `newest` returns the trainer's record of the run's newest state.

    **Raises:** `ConfigError` if there is no best checkpoint, or if a lower loss was measured whose
    checkpoint was not kept.
    """

    def __init__(self, config: Config, newest: Recorded) -> None:
        self._config = config
        self._folder = _find(config, newest)
        found = read_state(self._folder)
        self.recorded: ResumeState | None = ResumeState.read(found.extra, self._folder)
        self.bfloat16: frozenset[str] | None = found.bfloat16
        self._base = found.base
        self.needs_base = self._base is not None
        self.newest_step: int | None = found.step
        _require_lowest(self._folder, self.recorded, newest)

    def open(
        self,
        model: ModelSource,
        layout: ExecutionPlan,
        device: str,
        notice: Callable[[str], None],
        remote_shards: Sequence[store_factory.RemoteShardStore] | None = None,
    ) -> Store:
        """Return the weights of the checkpoint."""
        read = functools.partial(model.initial_weights, self._config.run.seed)
        if self._base is not None:
            self._base.require(model.weights_fingerprint(), model.weights_folder or model.name)
        return ReadOnlyStore(self._config, layout.program, self._folder, read, layout.shares.store)

    @contextmanager
    def reader(self, only_trained: bool) -> Iterator[WeightReader]:
        """Open the weights; with `only_trained`, frozen weights may be unavailable."""
        yield saved_weights(self._config, self._folder, only_trained)

    def begin_save(self, extra: Mapping[str, Any], best: bool) -> None:
        """Refuse: nothing is trained."""
        raise no_training()

    def poll(self) -> SavedCheckpoint | None:
        """Return None: no checkpoint is pending here."""
        return None

    def finish(self) -> SavedCheckpoint | None:
        """Return None: no checkpoint is pending here."""
        return None

    def abandon(self) -> None:
        """Do nothing: no checkpoint is pending here."""


def nothing_trained(config: Config) -> ConfigError:
    """Return the error for a run without a saved state."""
    return ConfigError(
        f"{config.run.dir} holds no checkpoint: nothing was trained there yet; run `penstock "
        "train` first"
    )


def saved_weights(config: Config, folder: Path, only_trained: bool) -> SavedWeights:
    """Return the reader of a checkpoint's weights.

    With `only_trained`, the frozen weights that the checkpoint omits may be unavailable.
    """
    base = read_state(folder).base
    needed = base is not None and not only_trained
    return SavedWeights(
        folder, model_sources.base_reader(config, base) if base and needed else None
    )


def _find(config: Config, newest: Recorded) -> Path:
    """Return the folder of the best checkpoint.

    **Raises:** `ConfigError` if there is none; the text says why.
    """
    folder = config.run.dir / "checkpoints"
    find_checkpoint(folder, "latest")  # raises the errors of an unreadable list
    try:
        best = find_checkpoint(folder, "best")
    except ConfigError:  # none is marked
        recorded = newest()
        if recorded is None:
            raise nothing_trained(config) from None
        raise ConfigError(f"{config.run.dir}: {_why_none(config, recorded)}") from None
    assert best is not None
    return best


def _why_none(config: Config, recorded: ResumeState) -> str:
    """Return why a run has no best checkpoint, and what to do."""
    newest = "or open the newest state, without --best (from Python: without best=True)"
    if not config.checkpoint.best:
        return (
            "no best checkpoint was kept, since checkpoint.best is false; set checkpoint.best: "
            f"true and train further, {newest}"
        )
    if config.evaluation.every is None:
        return (
            "no best checkpoint was kept, since evaluation.every is null: no held-out loss was "
            f"measured; set evaluation.every and train further, {newest}"
        )
    if recorded.best_loss is None and recorded.evaluations_since_best:
        return (
            "no best checkpoint was kept, since no evaluation found a finite loss; start a run "
            f"with a lower optimizer.learning_rate, {newest}"
        )
    if recorded.best_loss is None:
        return (
            "no best checkpoint was kept, since the run has not been evaluated yet "
            f"(evaluation.every is {config.evaluation.every} steps, and evaluations need held-out "
            f"data); train further, {newest}"
        )
    return (
        f"the checkpoint with the lowest held-out loss, {recorded.best_loss:g}, is not there: it "
        "was deleted, or checkpoint.best was false; train further, so that the next lower loss is "
        f"kept, {newest}"
    )


def _require_lowest(folder: Path, best: ResumeState | None, newest: Recorded) -> None:
    """Refuse a checkpoint if a later evaluation on as many batches found a lower loss."""
    try:
        recorded = newest()
    except PenstockError:
        return  # the newest state is damaged, or on a disk that is absent
    if recorded is None or best is None or recorded.best_loss is None or best.best_loss is None:
        return
    batches = {recorded.best_batches, best.best_batches} - {None}
    if len(batches) < 2 and recorded.best_loss < best.best_loss:
        raise ConfigError(
            f"{folder}: expected the checkpoint with the lowest held-out loss of the run, "
            f"{recorded.best_loss:g}, got one with {best.best_loss:g}: no checkpoint of the lower "
            "loss was kept (checkpoint.best was false, or the run was killed while it was "
            "written); train further, so that the next lower loss is kept, or open the newest "
            "state, without --best (from Python: without best=True)"
        )
