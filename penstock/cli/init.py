"""`penstock init`: write a starter configuration in which every key is explained."""

import os
from pathlib import Path
from typing import Annotated

import typer

_LONGEST_NAME_BYTES = 255  # of Linux and its file systems


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path(
        "train.yaml"
    ),
    model: Annotated[str, typer.Option(help="Preset to start from.")] = "gpt2",
    text: Annotated[
        list[str] | None,
        typer.Option("--input", help="Text file or glob to train on; may be repeated."),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="auto, bytes, train-bpe:SIZE, or the path of a tokenizer.")
    ] = "auto",
) -> None:
    """Write a starter configuration with every key, its default and its meaning."""
    from penstock.config import Config, commented
    from penstock.errors import ConfigError, StorageError

    name_bytes = len(os.fsencode(file.name))
    if (
        name_bytes > _LONGEST_NAME_BYTES
    ):  # or run.dir, which follows from the name, would be refused
        raise ConfigError(
            f"{file}: expected a file name of at most {_LONGEST_NAME_BYTES} bytes, got "
            f"{name_bytes}; choose a shorter one"
        )
    config = Config.from_mapping(
        {
            "model": model,
            "data": {"input": text or ["texts/**/*.txt"], "tokenizer": tokenizer},
            "run": {"dir": f"runs/{file.stem}"},
        }
    )
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(commented(config))
    except FileExistsError:
        raise ConfigError(
            f"{file} already exists and was not changed; choose another file"
        ) from None
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: expected a file in a folder that exists, {file.parent} does not; create it, "
            "or choose another file"
        ) from None
    except OSError as error:
        raise StorageError(f"{file}: cannot write this file: {error.strerror}") from None
    typer.echo(f"wrote {file}\nnext: penstock train {file}")
