"""What `penstock inspect` says of a store on flash, and its repair."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.cli.inspected_weights import sparse_lines
from penstock.progress import show_bytes, show_count

if TYPE_CHECKING:
    from penstock.errors import CorruptionError
    from penstock.store.flash import Repaired


def repair_flash(run: Path, flash: Path) -> None:
    """Roll a store back to its newest intact durable step, and print what was discarded."""
    from penstock.errors import CorruptionError
    from penstock.store.flash import repair

    try:
        found = repair(flash)
    except CorruptionError as error:
        raise CorruptionError(f"{_damaged(error)}; {_remaining(run)}") from error
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


def flash_hash(flash: Path) -> str:
    """Return the hash of the weights of the newest durable step."""
    from penstock.store.flash import open_reader

    with open_reader(flash) as reader:
        reader.verify(reader.newest)
        return reader.content_hash(reader.newest)


def newest_on_flash(flash: Path) -> int:
    """Return the newest durable step."""
    from penstock.store.flash import open_reader

    with open_reader(flash) as reader:
        return reader.newest


def _damaged(error: CorruptionError) -> str:
    """Return the text of an error, without the advice to repair the store."""
    from penstock.store.flash import REPAIR

    return str(error).removesuffix(f"; {REPAIR}")


def _remaining(run: Path) -> str:
    """Return what can be used of a run on flash of which no durable step is intact."""
    from penstock.errors import ConfigError, CorruptionError
    from penstock.store import find_checkpoint, verify_checkpoint

    try:
        best = find_checkpoint(run / "checkpoints", "best")
        assert best is not None
        state = verify_checkpoint(best)
    except (ConfigError, CorruptionError):
        return f"{run} has no intact checkpoint either: restore the store from a copy"
    return (
        f"{best}, the best checkpoint, of step {state.step}, is intact: `penstock export "
        f"{shlex.quote(str(run))} OUT --best` writes its weights to OUT; a new run with "
        "model.hf=OUT starts from them"
    )


def show_flash(run: Path, flash: Path) -> CorruptionError | None:
    """Print the durable steps on flash; return the damage of the newest that is not whole."""
    from penstock.errors import CorruptionError, StorageError
    from penstock.store.flash import open_reader

    damage: CorruptionError | None = None
    is_any_intact = False
    try:
        opened = open_reader(flash)
    except StorageError as error:
        typer.echo(f"flash        not checked: {error}")
        return None
    except CorruptionError as error:
        typer.echo(f"flash        {flash}  DAMAGED")
        return error
    with opened as reader:
        typer.echo(
            f"flash        {flash}: {show_bytes(reader.bytes)}, of which "
            f"{show_bytes(reader.state_bytes)} per step; {show_count(reader.parameters)} "
            f"parameters in {reader.weights} weights{_shards(reader.shards)}"
        )
        for step in reader.steps:
            try:
                reader.verify(step)
                is_any_intact, whole = True, "all checksums match"
            except CorruptionError as error:
                damage, whole = error, "DAMAGED"
            newest = " (newest)" if step == reader.steps[-1] else ""
            typer.echo(f"durable      step {step}  {whole}{newest}")
        if damage is None and reader.steps:
            typer.echo(f"weights      {reader.content_hash(reader.steps[-1])}")
            for line in sparse_lines(reader.sparse, reader.kept):
                typer.echo(line)
    if damage is not None and not is_any_intact:
        text = f"{_damaged(damage)}\n{flash}: no durable step is intact; {_remaining(run)}"
        damage = CorruptionError(text)
    return damage


def _shards(count: int) -> str:
    return f", in {count} shards" if count > 1 else ""
