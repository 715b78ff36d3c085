"""`penstock inspect`: what a run holds, and whether every byte of it is still what was written."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.inspected_flash import flash_hash, newest_on_flash, repair_flash, show_flash
from penstock.cli.inspected_progress import configuration_lines, progress_lines
from penstock.cli.inspected_weights import counted, sparse_lines
from penstock.progress import show_bytes

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.errors import CorruptionError
    from penstock.store import CheckpointState, ReadBase


def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    only_hash: Annotated[
        bool,
        typer.Option(
            "--hash",
            help="Print only a hash of the newest weights; weights equal to the bit have equal "
            "hashes.",
        ),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Go back to the newest intact checkpoint or, on flash, durable step."
        ),
    ] = False,
) -> None:
    """Verify and print RUN: configuration, progress, data, checkpoints, state on flash.

    Exits with 6 and names the file and the position if any byte is damaged, or after a repair still
    is.
    """
    from penstock.config import load_run, verify_record
    from penstock.errors import ConfigError, CorruptionError

    damage = Damage(run)
    damage.find(lambda: verify_record(run))
    try:
        settings = load_run(run)
    except ConfigError:
        damage.raise_if_found()  # which is why
        raise

    from penstock.store import checkpoint_folders, find_checkpoint

    latest = find_checkpoint(run / "checkpoints", "latest")
    flash = settings.store.flash.path
    if repair:
        if flash is not None:
            repair_flash(run, flash)
        else:
            _repair_checkpoints(run)
        _show_data(settings, damage)
        _show_kept(run, damage)
        damage.raise_if_found()
        return
    if only_hash:
        typer.echo(flash_hash(flash) if flash is not None else _newest_hash(run, settings, latest))
        return
    for line in (*configuration_lines(settings), *progress_lines(run, _saved(flash, latest))):
        typer.echo(line)
    _show_data(settings, damage)
    _show_kept(run, damage)
    if flash is not None:
        damage.add(show_flash(run, flash))
    for folder in checkpoint_folders(run / "checkpoints"):
        try:
            state = _verified(folder)
        except CorruptionError as error:
            typer.echo(f"checkpoint   {folder.name}  DAMAGED{_remedy(run, flash)}")
            damage.add(error)
            continue
        typer.echo(f"checkpoint   {folder.name}  {_checkpoint(state)}{_marks(run, folder, latest)}")
        if folder == latest:
            typer.echo(f"weights      {_hash(settings, folder, state)}")
            for line in sparse_lines(state.sparse, state.kept):
                typer.echo(line)
    if latest is None and flash is None:
        typer.echo("checkpoint   none yet")
    damage.raise_if_found()


def _repair_checkpoints(run: Path) -> None:
    """Go back to the newest intact checkpoint, and print where the damaged ones are."""
    from penstock.store import FolderLock, repair_checkpoints

    lock = FolderLock(run, "run.dir", "training.lock")
    try:
        found = repair_checkpoints(run / "checkpoints")
    finally:
        lock.release()
    typer.echo(f"{found.newest} is the newest checkpoint, all checksums match")
    for folder in found.set_aside:
        typer.echo(f"damaged, no longer used: {folder}")


def _saved(flash: Path | None, latest: Path | None) -> int | None:
    """Return the step after which the next start continues; None if it is unknown."""
    from penstock.errors import PenstockError
    from penstock.store import read_state

    try:
        if flash is not None:
            return newest_on_flash(flash)
        return None if latest is None else read_state(latest).step
    except PenstockError:  # reported where the state is verified
        return None


def _remedy(run: Path, flash: Path | None) -> str:
    repair = f"`{_command(run)} --repair` goes back to the newest intact checkpoint"
    return f"; {repair}" if flash is None else ""


def _command(run: Path) -> str:
    return f"penstock inspect {shlex.quote(str(run))}"


def _newest_hash(run: Path, settings: Config, latest: Path | None) -> str:
    """Return the hash of the newest checkpoint.

    **Raises:** `ConfigError` if there is none.
    """
    from penstock.errors import ConfigError
    from penstock.store import checkpoint_hash, verify_checkpoint

    if latest is None:
        raise ConfigError(f"{run}: no checkpoint yet, so there are no weights to hash")
    return checkpoint_hash(latest, _base_reader(settings, verify_checkpoint(latest)))


class Damage:
    """What was found to be damaged in a run, in the order in which it was looked at."""

    def __init__(self, run: Path) -> None:
        self._command = _command(run)
        self._found: list[CorruptionError] = []

    def add(self, error: CorruptionError | None) -> None:
        """Note a damage, if it is one."""
        if error is not None:
            self._found.append(error)

    def find(self, check: Callable[[], Any]) -> bool:
        """Return whether a check finds all whole; note what it does not."""
        from penstock.errors import CorruptionError

        try:
            check()
        except CorruptionError as error:
            self.add(error)
            return False
        return True

    def raise_if_found(self) -> None:
        """Raise `CorruptionError` with a line for each, if there is any."""
        from penstock.errors import CorruptionError

        if self._found:
            text = "\n".join(map(str, self._found))
            text = text.replace("penstock inspect RUN", self._command)
            raise CorruptionError(text) from self._found[0]


def _show_data(settings: Config, damage: Damage) -> None:
    """Print the data set that the run trains on, if its configuration names one."""
    from penstock.data import TokenDataset
    from penstock.errors import DataError

    folder = settings.data_dir
    if not folder.exists():
        if settings.data.path is not None:
            typer.echo(f"data         {folder}  does not exist")
        return
    try:
        is_whole = damage.find(lambda: TokenDataset.open(folder, verify=True))
    except DataError as error:
        typer.echo(f"data         not checked: {error}")
        return
    typer.echo(f"data         {folder}  {'all checksums match' if is_whole else 'DAMAGED'}")


def _show_kept(run: Path, damage: Damage) -> None:
    """Print what the run keeps of the Hugging Face folder that it started from, if it did."""
    from penstock.models import KEPT, verify_kept

    kept = run / KEPT
    if kept.is_dir():
        is_whole = damage.find(lambda: verify_kept(kept))
        state = "all checksums match" if is_whole else "DAMAGED"
        typer.echo(f"model files  {kept}  {state}")


def _base_reader(settings: Config, state: CheckpointState) -> ReadBase | None:
    """Return what reads the weights that a checkpoint does not hold, if there are any."""
    if state.base is None:
        return None
    from penstock.planning import model_sources

    return model_sources.base_reader(settings, state.base)


def _hash(settings: Config, folder: Path, state: CheckpointState) -> str:
    """Return the hash of a checkpoint's weights, or why there is none."""
    from penstock.errors import ConfigError
    from penstock.store import checkpoint_hash

    try:
        return checkpoint_hash(folder, _base_reader(settings, state))
    except ConfigError as error:  # of the base: all that is in the run itself is whole
        return f"not hashed: {error}"


def _verified(folder: Path) -> CheckpointState:
    from penstock.errors import ConfigError, CorruptionError
    from penstock.store import verify_checkpoint

    try:
        return verify_checkpoint(folder)
    except ConfigError as error:  # a listed checkpoint is missing
        raise CorruptionError(str(error)) from error


def _checkpoint(state: CheckpointState) -> str:
    based = state.base_weights
    beside = f" beside {counted(based)} of the base (model.hf)" if based else ""
    return (
        f"step {state.step}, {counted(state.weights)}{beside}, "
        f"{show_bytes(state.bytes)} in {len(state.files)} files, all checksums match"
    )


def _marks(run: Path, folder: Path, latest: Path | None) -> str:
    from penstock.errors import ConfigError
    from penstock.store import find_checkpoint

    try:
        best = find_checkpoint(run / "checkpoints", "best")
    except ConfigError:  # None is marked as the best: the run was never evaluated.
        best = None
    marks = [word for word, of in (("newest", latest), ("best", best)) if of == folder]
    return f" ({', '.join(marks)})" if marks else ""
