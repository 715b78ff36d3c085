"""`penstock eval`: what a run makes of its held-out data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set, such as data.path=FOLDER."),
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(min=1, help="Batches of batch.size sequences; default evaluation.batches."),
    ] = None,
) -> None:
    """Evaluate the newest checkpoint of RUN on its held-out text or records."""
    from penstock.cli.figures import show_shares
    from penstock.config import load_run

    settings = load_run(run, overrides or ())

    from penstock.trainer import Trainer

    trainer = Trainer(settings, must_exist=True, cluster="none")
    result = trainer.evaluate(batches)
    text = f"step {trainer.step}  loss {result['loss']:.6f}"
    if "perplexity" not in result:  # not of a language model
        typer.echo(f"{text}  ({result['tokens']} rows)")
        return
    shares = show_shares(result.get("accuracy"), result.get("exact_match"))
    records = f" of {result['records']} records" if "records" in result else ""
    typer.echo(
        f"{text}  perplexity {result['perplexity']:.6g}{shares}  "
        f"({result['tokens']} tokens{records})"
    )
