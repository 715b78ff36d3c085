"""`penstock generate`: let a trained model write."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.arguments import Best

if TYPE_CHECKING:
    from penstock.telemetry import Event


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
    from penstock.progress import SilentView, view_for_command

    require_utf8("--prompt", prompt)
    settings = load_run(run)

    from rich.console import Console

    from penstock.training import Trainer

    # `penstock train` shows the notices about the run.
    view: Callable[[Event], None] = SilentView()
    trainer = Trainer(
        settings,
        must_exist=True,
        cluster="none",
        on_event=lambda event: view(event),
        quiet=True,
        best=best,
    )
    view = shown = view_for_command(Console(stderr=True), settings.logging.every, quiet=True)
    with closing(trainer):
        pieces = trainer.generate(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k or None,
            seed=seed,
        )
        # Most errors and notices come with the first token. Later notices follow the text.
        typer.echo(prompt + next(pieces, ""), nl=False)
        later: list[Event] = []
        view = later.append
        try:
            for piece in pieces:
                typer.echo(piece, nl=False)
            typer.echo()
        finally:
            for event in later:
                shown(event)
