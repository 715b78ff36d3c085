"""`penstock scale`: change the number of engines of a run that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def scale(
    run: Annotated[Path, typer.Argument(help="Folder of a run that is training now.")],
    engines: Annotated[
        str, typer.Argument(metavar="engines=NUMBER", help="New number of engines.")
    ],
) -> None:
    """Change the number of engines of RUN from its next step; the result stays the same to the bit.

    Needs a run with `cluster.start` other than none, started by the same user.
    """
    from penstock.errors import ConfigError

    key, _, number = engines.partition("=")
    if key != "engines" or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"expected engines=NUMBER, 1 or more, got {engines!r}")

    from penstock.distributed.control import scale as order

    before = order(run, int(number))
    typer.echo(f"{run}: {before} engine(s) now, {number} from the next step")
