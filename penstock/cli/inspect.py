"""`penstock inspect`: what a run holds, and whether every byte of it is still what was written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.progress import (
    compared_lines,
    cycle_lines,
    show_bytes,
    show_count,
    show_shares,
    show_sparsity,
)

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.errors import CorruptionError
    from penstock.store import CheckpointState, ReadBase
    from penstock.store.flash import Repaired


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
            "--repair", help="For a store on flash: roll back to the newest intact durable step."
        ),
    ] = False,
) -> None:
    """Verify and print RUN: configuration, progress, data, checkpoints, state on flash.

    Exits with 6 and names the file and the position if any byte is damaged.
    """
    from penstock.config import load_run, verify_record
    from penstock.errors import ConfigError, CorruptionError

    damage = Damage()
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
        _repair(flash)
        return
    if only_hash:
        typer.echo(_flash_hash(flash) if flash is not None else _newest_hash(run, settings, latest))
        return
    for line in (*_configuration_lines(settings), *_progress_lines(run)):
        typer.echo(line)
    _show_data(settings, damage)
    _show_kept(run, damage)
    if flash is not None:
        damage.add(_show_flash(flash))
    for folder in checkpoint_folders(run / "checkpoints"):
        try:
            state = _verified(folder)
        except CorruptionError as error:
            typer.echo(f"checkpoint   {folder.name}  DAMAGED")
            damage.add(error)
            continue
        typer.echo(f"checkpoint   {folder.name}  {_checkpoint(state)}{_marks(run, folder, latest)}")
        if folder == latest:
            typer.echo(f"weights      {_hash(settings, folder, state)}")
            for line in _sparse_lines(state.sparse, state.kept):
                typer.echo(line)
    if latest is None and flash is None:
        typer.echo("checkpoint   none yet")
    damage.raise_if_found()


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
    """What was found to be damaged, in the order in which it was looked at."""

    def __init__(self) -> None:
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
            raise CorruptionError("\n".join(map(str, self._found))) from self._found[0]


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


def _repair(flash: Path | None) -> None:
    from penstock.errors import ConfigError
    from penstock.store.flash import repair

    if flash is None:
        raise ConfigError(
            "--repair: expected a run with a store on flash, this run has none; its checkpoints "
            "need no repair: use an undamaged one"
        )
    found = repair(flash)
    typer.echo(f"{flash} is at step {found.step}, all checksums match")
    typer.echo(f"discarded: {_discarded(found)}")


def _discarded(found: Repaired) -> str:
    damaged = [step for step in found.discarded if step > found.step]
    older = [step for step in found.discarded if step < found.step]
    parts = []
    for steps, why in ((damaged, "damaged"), (older, "older, to be overwritten next")):
        if steps:
            name = "step" if len(steps) == 1 else "steps"
            parts.append(f"{name} {', '.join(map(str, steps))} ({why})")
    if found.damaged_journal:
        parts.append("damaged records of the journal")
    return "; ".join(parts) or "nothing: no byte is damaged"


def _flash_hash(flash: Path) -> str:
    from penstock.store.flash import open_reader

    with open_reader(flash) as reader:
        reader.verify(reader.newest)
        return reader.content_hash(reader.newest)


def _show_flash(flash: Path) -> CorruptionError | None:
    """Print the durable steps on flash; return the damage of the newest that is not whole."""
    from penstock.errors import CorruptionError, StorageError
    from penstock.store.flash import open_reader

    damage: CorruptionError | None = None
    try:
        opened = open_reader(flash)
    except StorageError as error:
        typer.echo(f"flash        not checked: {error}")
        return None
    with opened as reader:
        typer.echo(
            f"flash        {flash}: {show_bytes(reader.bytes)}, of which "
            f"{show_bytes(reader.state_bytes)} per step; {show_count(reader.parameters)} "
            f"parameters in {reader.weights} weights{_shards(reader.shards)}"
        )
        for step in reader.steps:
            try:
                reader.verify(step)
                whole = "all checksums match"
            except CorruptionError as error:
                damage, whole = error, "DAMAGED"
            newest = " (newest)" if step == reader.steps[-1] else ""
            typer.echo(f"durable      step {step}  {whole}{newest}")
        if damage is None and reader.steps:
            typer.echo(f"weights      {reader.content_hash(reader.steps[-1])}")
            for line in _sparse_lines(reader.sparse, reader.kept):
                typer.echo(line)
    return damage


def _shards(count: int) -> str:
    return f", in {count} shards" if count > 1 else ""


def _base_reader(settings: Config, state: CheckpointState) -> ReadBase | None:
    """Return what reads the weights that a checkpoint does not hold, if there are any."""
    if state.base is None:
        return None
    from penstock.planning import builders

    return builders.base_reader(settings, state.base)


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


def _configuration_lines(settings: Config) -> list[str]:
    from penstock.config import digest, dump_inline

    model = settings.to_mapping()["model"]
    schedule = settings.optimizer.schedule.name
    return [
        f"run          {settings.run.dir}",
        f"model        {dump_inline(model) if model is not None else 'given from Python'}",
        f"training     {settings.run.steps} steps of {settings.batch.size} sequences, "
        f"{settings.precision}, {settings.optimizer.name} {settings.optimizer.learning_rate:g} "
        f"{schedule}, seed {settings.run.seed}",
        f"trajectory   {digest(settings)}",
    ]


def _progress_lines(run: Path) -> list[str]:
    from penstock.telemetry import reported, stream_metrics

    step: dict | None = None
    report: dict | None = None
    last: dict | None = None
    best: dict | None = None
    for row in stream_metrics(run / "metrics.jsonl"):  # as many rows as the run has steps
        if row.get("event") == "step":
            step = row
        elif row.get("event") == "report":
            report = row
        elif row.get("event") == "evaluation":
            last = row
            if best is None or _or_infinity(row.get("loss")) < _or_infinity(best.get("loss")):
                best = row
    lines = []
    if step is not None:
        lines.append(f"progress     step {step['step']}, loss {_loss(step)}")
    if last is not None and best is not None:
        lines.append(
            f"held out     loss {_loss(last)} at step {last['step']}, "
            f"best {_loss(best)} at step {best['step']}"
            + show_shares(_share(last, "accuracy"), _share(last, "exact_match"))
        )
    measured = None if report is None else reported(report)
    if measured is not None:
        lines += [f"prediction   {line}" for line in compared_lines(measured)]
        lines += [f"wafer        {line}" for line in cycle_lines(measured)]
    if step is not None:
        lines += _stage_lines(step)
    return lines


def _stage_lines(row: Mapping[str, Any]) -> list[str]:
    """Return a line for each stage of a step on a simulated wafer; none if the row has none, or is
    damaged."""
    cycles = row.get("cycles")
    stages = cycles.get("stages") if isinstance(cycles, dict) else None
    if not isinstance(cycles, dict) or not isinstance(stages, dict):
        return []
    lines = [
        f"cycles       step {row['step']} on {cycles.get('mesh')} cores ({cycles.get('cores')}), "
        "by stage"
    ]
    for name, sweeps in stages.items():
        parts = [
            f"{sweep} {value:,.0f} {source.replace('_', ' ')}"
            for sweep, figures in _items(sweeps)
            for source, value in _items(figures)
            if isinstance(value, float | int)
        ]
        lines.append(f"             {name}: {', '.join(parts)}")
    return lines


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _checkpoint(state: CheckpointState) -> str:
    based = state.base_weights
    beside = f" beside {_counted(based)} of the base (model.hf)" if based else ""
    return (
        f"step {state.step}, {_counted(state.weights)}{beside}, "
        f"{show_bytes(state.bytes)} in {len(state.files)} files, all checksums match"
    )


def _sparse_lines(shapes: Mapping[str, tuple[int, ...]], kept: Mapping[str, int]) -> list[str]:
    """Return a line for all sparse weights together and one for each; none if there are none."""
    if not shapes:
        return []
    elements = {name: math.prod(shape) for name, shape in shapes.items()}
    lines = [
        f"sparse       {len(elements)} weights: "
        f"{_entries(sum(kept.values()), sum(elements.values()))}"
    ]
    for name, shape in shapes.items():
        size = " x ".join(map(str, shape))
        lines.append(f"             {name} [{size}]: {_entries(kept[name], elements[name])}")
    return lines


def _entries(kept: int, elements: int) -> str:
    return f"sparsity {show_sparsity(1 - kept / elements)}, {kept:,} of {elements:,} entries"


def _counted(shapes: Mapping[str, tuple[int, ...]]) -> str:
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return f"{show_count(parameters)} parameters in {len(shapes)} weights"


def _marks(run: Path, folder: Path, latest: Path | None) -> str:
    from penstock.errors import ConfigError
    from penstock.store import find_checkpoint

    try:
        best = find_checkpoint(run / "checkpoints", "best")
    except ConfigError:  # None is marked as the best: the run was never evaluated.
        best = None
    marks = [word for word, of in (("newest", latest), ("best", best)) if of == folder]
    return f" ({', '.join(marks)})" if marks else ""


def _share(row: dict, name: str) -> float | None:
    share = row.get(name)
    return share if isinstance(share, float) else None


def _loss(row: dict) -> str:
    value = row.get("loss")
    unit = " nats per token" if row.get("accuracy") is not None else ""  # of language models
    return "not finite" if value is None else f"{value:.4f}{unit}"


def _or_infinity(value: float | None) -> float:
    return math.inf if value is None else value
