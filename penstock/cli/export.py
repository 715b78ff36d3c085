"""`penstock export`: a folder that `transformers` loads."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.arguments import Best
from penstock.progress import show_bytes


class Dtype(StrEnum):
    """Types of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder to write.")],
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.fp32,
    shard_size: Annotated[
        str, typer.Option(help="Maximum size of a file; a larger weight gets its own file.")
    ] = "5GB",
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Only the LoRA adapters, in PEFT's format.")
    ] = False,
    packed: Annotated[
        bool,
        typer.Option(
            "--packed",
            help="Sparse weights as values and masks, in one file: smaller, and only Penstock "
            "reads it (model.hf).",
        ),
    ] = False,
    best: Best = False,
) -> None:
    """Write the newest state of RUN as a Hugging Face folder: safetensors, tokenizer and JSON.

    Weights of any size are copied piece by piece. LoRA adapters are merged into the weights.
    """
    from penstock.config import ByteSize, load_run
    from penstock.errors import ConfigError

    try:
        shard_bytes = ByteSize.parse(shard_size)
    except ValueError as error:
        raise ConfigError(f"--shard-size: {error}") from None
    settings = load_run(run)
    if packed and settings.sparsity.method is None:
        raise ConfigError(
            f"--packed: expected a run with sparse weights, {run} has none (sparsity.method is "
            "null); export it without --packed"
        )
    if packed and adapters:
        raise ConfigError("--packed: has no effect on --adapters; choose one of them")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists and was not changed; choose a new folder")

    from penstock.training import describe_base, export_run

    export_run(
        settings,
        out,
        dtype.value,
        shard_bytes,
        only_adapters=adapters,
        packed=packed,
        best=best,
    )
    files = sorted(out.iterdir())
    written = show_bytes(sum(file.stat().st_size for file in files))
    typer.echo(f"wrote {out}: {', '.join(file.name for file in files)} ({written})")
    if adapters:
        typer.echo(describe_base(settings))
