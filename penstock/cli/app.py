"""The `penstock` command: one file per subcommand, and how errors reach the user.

Heavy imports (torch, transformers, numba) happen inside the commands, after the configuration has
been checked, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from penstock.cli import data, evaluate, export, generate, init, inspect, program, scale, train
from penstock.errors import PenstockError

app = typer.Typer(
    name="penstock",
    help="Train neural networks larger than the device that computes them, by streaming their "
    "weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, with any command.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_tell_version),
    ] = False,
) -> None:
    """Train neural networks larger than the device that computes them."""


app.command("init")(init.init)
app.command("train")(train.train)
app.command("scale")(scale.scale)
app.command("eval")(evaluate.evaluate)
app.command("generate")(generate.generate)
app.command("export")(export.export)
app.command("inspect")(inspect.inspect)
app.command("program")(program.program)
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line; exit with 0, or with the `exit_code` of the error.

    A `PenstockError` is the user's to mend: its message goes to stderr, without a traceback.
    """
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    try:
        app(args=[a for a in arguments if a != "--debug"], prog_name="penstock")
    except PenstockError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
