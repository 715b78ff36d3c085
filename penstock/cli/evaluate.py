"""`penstock eval`: what a run makes of its held-out data."""

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
    if "perplexity" not in result:  # not of a language model
        typer.echo(f"step {step}  {show_evaluation(found, digits=6)}  ({result['rows']} rows)")
        return
    records = f" of {result['records']} records" if "records" in result else ""
    typer.echo(
        f"step {step}  {show_evaluation(found, digits=6)}  ({result['tokens']} tokens{records})"
    )
