"""`penstock generate`: let a trained model write."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.arguments import Best


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0: always the most probable token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from this many most probable tokens; 0: all.")
    ] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    best: Best = False,
) -> None:
    """Generate text with the newest checkpoint of RUN, and print each token at once."""
    from penstock.config import load_run
    from penstock.errors import require_utf8
    from penstock.progress import SilentView, View, view_for_command

    require_utf8("--prompt", prompt)
    settings = load_run(run)

    from rich.console import Console

    from penstock.training import Trainer

    view: View = SilentView()  # `penstock train` shows the notices about the run
    trainer = Trainer(
        settings,
        must_exist=True,
        cluster="none",
        on_event=lambda event: view(event),
        quiet=True,
        best=best,
    )
    view = view_for_command(Console(stderr=True), settings.logging.every, quiet=True)
    with closing(trainer):
        pieces = trainer.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k or None,
            seed=seed,
        )
        # Most errors and notices come with the first token: then text and notes share no line.
        typer.echo(prompt + next(pieces, ""), nl=False)
        for piece in pieces:
            typer.echo(piece, nl=False)
        typer.echo()
