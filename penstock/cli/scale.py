"""`penstock scale`: change the number of engines and relays of a run that trains."""

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

_LEAST = {"engines": 1, "relays": 0}


def scale(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is training now.")],
    numbers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="engines=NUMBER relays=NUMBER",
            help="New numbers, one or both. Without any: print how many are wanted and ready.",
        ),
    ] = None,
) -> None:
    """Change the number of engines of RUN from its next step; the result stays the same to the bit.

    Without `relays` their number follows from `fabric.relays`. Needs a run with `cluster.start`
    other than none, started by the same user. Without numbers nothing changes: the command prints
    how many engines and relays the run wants, and how many of them are ready.
    """
    from penstock.errors import ConfigError, numbered

    wanted: dict[str, int] = {}
    for text in numbers or ():
        key, _, number = text.partition("=")
        if key not in _LEAST or not number.isdecimal() or int(number) < _LEAST[key]:
            raise ConfigError(
                f"expected engines=NUMBER, 1 or more, or relays=NUMBER, 0 or more, got {text!r}"
            )
        wanted[key] = int(number)

    from penstock.distributed.control import scale as order

    done = order(run, wanted.get("engines"), wanted.get("relays"))
    engines, relays = numbered(done.engines_before, "engine"), numbered(done.relays_before, "relay")
    if not wanted:
        present = f"{engines} wanted, {done.engines_ready} ready"
        if done.relays_before or done.relays_ready:
            present += f"; {relays} wanted, {done.relays_ready} ready"
        typer.echo(f"{run}: {present}; to change: penstock scale {quote(str(run))} engines=NUMBER")
        return
    typer.echo(f"{run}: {engines} now, {done.engines} from the next step")
    if done.relays_before or done.relays:
        typer.echo(f"{run}: {relays} now, {done.relays} from the next step")
