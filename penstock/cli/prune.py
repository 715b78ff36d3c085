"""`penstock prune`: a checkpoint without its entries of the least magnitude."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.export import Dtype
from penstock.progress import show_bytes, show_count, show_sparsity


class Distribution(StrEnum):
    """How the sparsity is distributed over the weights."""

    uniform = "uniform"
    erdos_renyi_kernel = "erdos_renyi_kernel"


def prune(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Hugging Face folder with safetensors.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder to write.")],
    sparsity: Annotated[
        float, typer.Option(help="Share of the entries to set to zero, such as 0.9.")
    ],
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Pattern of the names of weights to prune; may be repeated. Default: weights of "
            "two dimensions, but for embeddings and heads.",
        ),
    ] = None,
    keep_dense: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Pattern of weights to leave; may be repeated."),
    ] = None,
    distribution: Annotated[
        Distribution, typer.Option(help="Equal sparsity, or denser where a weight is small.")
    ] = Distribution.uniform,
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.fp32,
    packed: Annotated[
        bool,
        typer.Option(
            "--packed",
            help="Write values and masks instead of zeros: smaller, and only Penstock reads it.",
        ),
    ] = False,
) -> None:
    """Write MODEL pruned in one shot: of each weight, the entries of the least magnitude are zero.

    To train it further with these masks: model.hf=OUT sparsity.method=static
    sparsity.initial_mask=zeros.
    """
    from penstock.errors import ConfigError

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists and was not changed; choose a new folder")

    from penstock.training import prune_model

    done = prune_model(
        model,
        out,
        sparsity,
        patterns=weights or (),
        keep_dense=keep_dense or (),
        distribution=distribution.value,
        dtype=dtype.value,
        packed=packed,
    )
    kept, written = sum(done.kept.values()), sum(file.stat().st_size for file in done.files)
    typer.echo(
        f"wrote {out}: {len(done.kept)} weights keep {show_count(kept)} entries, sparsity "
        f"{show_sparsity(done.sparsity)} ({show_bytes(written)})"
    )
    if done.zeros:
        typer.echo(
            f"note: {show_count(done.zeros)} of these entries are zero in {model} already: its "
            "weights are sparser than --sparsity"
        )
