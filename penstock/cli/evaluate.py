"""`penstock eval`: what a run makes of its held-out data."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.arguments import Best


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys to set, such as data.path=FOLDER."),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="Batches of batch.size sequences; default evaluation.batches."),
    ] = None,
    best: Best = False,
) -> None:
    """Evaluate the newest checkpoint of RUN on its held-out text or records."""
    from penstock.config import load_run
    from penstock.progress import show_evaluation
    from penstock.telemetry import Evaluated

    settings = load_run(run, overrides or ())

    from penstock.training import Trainer

    trainer = Trainer(settings, must_exist=True, cluster="none", quiet=True, best=best)
    with closing(trainer):
        result = trainer.evaluate(batches)
        step = trainer.step
    found = Evaluated.of(result, step, 0.0, best=False)
    typer.echo(f"step {step}  {show_evaluation(found)}  ({_extent(result)})")


def _extent(result: Mapping[str, float]) -> str:
    """Return how much of the held-out data an evaluation has read."""
    if "rows" in result:  # not of a language model
        return f"{result['rows']:,} rows"
    tokens = f"{result['tokens']:,} tokens"
    if "records" in result:
        return f"{tokens} of {_part(result['records'], result['held_out_records'], 'records')}"
    if "held_out_tokens" in result:
        return _part(result["tokens"], result["held_out_tokens"], "tokens")
    return tokens


def _part(read: float, held_out: float, unit: str) -> str:
    if read >= held_out:
        return f"all {held_out:,} held-out {unit}"
    return f"{read:,} of {held_out:,} held-out {unit}; --batches NUMBER reads more"
