"""The `penstock` command: one file per subcommand, and how errors reach the user.

Heavy imports (torch, transformers, numba) happen inside the commands, after the configuration has
been checked, so that help and mistakes are answered at once.
"""

import contextlib
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from penstock.cli import (
    calibrate,
    data,
    evaluate,
    export,
    generate,
    init,
    inspect,
    output,
    plan,
    program,
    prune,
    scale,
    train,
    wafer,
)
from penstock.cli.system_errors import explain_system_error, refuse_unreadable_arguments
from penstock.errors import PenstockError
from penstock.telemetry import process_memory

app = typer.Typer(
    name="penstock",
    help="Train neural networks larger than the device that computes them, by streaming their "
    "weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


# Measured with PyTorch 2.13 for CPUs: the smallest run is made in 1.4 GiB, and not in 1.2.
_LEAST_ADDRESS_SPACE_BYTES = 1280 << 20
_WITH_TORCH = (
    "train",
    "eval",
    "generate",
    "export",
    "prune",
    "program",
    "plan",
    "scale",
    "wafer",
    "calibrate",
)


@app.callback()
def root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error; for every command.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Train neural networks larger than the device that computes them."""
    if context.invoked_subcommand in _WITH_TORCH:
        process_memory.require_address_space(_LEAST_ADDRESS_SPACE_BYTES)


# The lines of `penstock --help` are whole at 80 columns: those of the docstrings would be cut.
app.command("init", short_help="Write a configuration that explains every key.")(init.init)
app.command("train", short_help="Train a model.")(train.train)
app.command("scale", short_help="Change the number of engines of a run.")(scale.scale)
app.command("eval", short_help="Evaluate a run on its held-out data.")(evaluate.evaluate)
app.command("generate", short_help="Generate text with the model of a run.")(generate.generate)
app.command("export", short_help="Write the model of a run as a Hugging Face folder.")(
    export.export
)
app.command("prune", short_help="Write a model with its smallest entries at zero.")(prune.prune)
app.command("inspect", short_help="Verify the files of a run and print its progress.")(
    inspect.inspect
)
app.command("program", short_help="Show the stages of a model and their sizes.")(program.program)
app.add_typer(plan.app, name="plan")
app.add_typer(wafer.app, name="wafer")
app.command("calibrate", short_help="Measure this host, for `penstock plan`.")(calibrate.calibrate)
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line; exit with 0, or with the `exit_code` of the error.

    A `PenstockError` is an error that the user can correct: its message is printed on stderr,
    without a traceback. The same applies to an error of the operating system that no other code
    handles.
    """
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    output.open_closed_streams()
    try:
        refuse_unreadable_arguments(arguments)
        app(args=[a for a in arguments if a != "--debug"], prog_name="penstock")
    except PenstockError as error:
        _fail(error, debug)
    except Exception as error:
        explained = explain_system_error(error)
        if explained is None:
            raise
        _fail(explained, debug)
    finally:
        output.settle()


def _fail(error: PenstockError, debug: bool) -> NoReturn:
    """Print an error on an open stream, and exit with its code."""
    with contextlib.suppress(OSError):
        if debug:
            traceback.print_exc()
        # Characters that the locale cannot represent are written as escapes.
        text = f"error: {error}".encode(sys.stderr.encoding or "utf-8", "backslashreplace")
        print(text.decode(sys.stderr.encoding or "utf-8"), file=sys.stderr)
    raise SystemExit(error.exit_code) from None
