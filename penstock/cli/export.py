"""`penstock export`: a folder that `transformers` loads."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.figures import show_bytes


class Dtype(StrEnum):
    """Types of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[Path, typer.Argument(help="New folder to write.")],
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.fp32,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Only the LoRA adapters, in PEFT's format.")
    ] = False,
) -> None:
    """Write the newest checkpoint of RUN as a Hugging Face folder: safetensors and JSON.

    LoRA adapters are merged into the weights.
    """
    from penstock.config import load_run
    from penstock.errors import ConfigError

    settings = load_run(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is left as it is; name a new folder")

    from penstock.trainer import Trainer

    trainer = Trainer(settings, must_exist=True)
    write = trainer.export_adapters if adapters else trainer.export
    write(out, dtype.value)
    files = sorted(out.iterdir())
    written = show_bytes(sum(file.stat().st_size for file in files))
    typer.echo(f"wrote {out}: {', '.join(file.name for file in files)} ({written})")
