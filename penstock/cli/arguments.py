"""Arguments and options that several commands have, and the configuration that they stand for."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.garbage_collection import collection_disabled

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.program import Program
    from penstock.wafer import CoreParameters, Mesh


class Precision(StrEnum):
    """Types of streamed weights."""

    fp32 = "fp32"
    bf16 = "bf16"


_MODEL_HELP = "Preset, run configuration (.yaml), or Hugging Face config.json."

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help=_MODEL_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to set, such as model.n_layer=6."),
]
MicroBatch = Annotated[
    int | None,
    typer.Option(
        min=1, help="Sequences of one micro-batch; default batch.micro, 1 if that is auto."
    ),
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens per sequence; default those of the run, else the model's context."
    ),
]
WeightPrecision = Annotated[
    Precision | None, typer.Option(help="Type of streamed weights; default fp32.")
]
Pictures = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="File to write; its ending chooses the format. Repeat it for several. Default: "
        "NAME.png, or NAME.gif for an animation.",
    ),
]
Best = Annotated[
    bool,
    typer.Option(
        "--best",
        help="Use the checkpoint with the lowest held-out loss instead of the newest state.",
    ),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Cores = Annotated[
    str,
    typer.Option(metavar="NAME", help="Costs of a core: sim, silicon, or a file (.yaml)."),
]


def configuration(model: str, overrides: list[str] | None) -> Config:
    """Return the configuration that a preset's name, a YAML file or a config.json stands for."""
    from penstock.config import Config, load

    given = overrides or []
    if model.endswith((".yaml", ".yml")):
        return load(model, given)
    spec: str | dict[str, str] = {"hf_config": model} if Path(model).exists() else model
    return Config.from_mapping({"model": spec}, given)


def build(
    config: Config,
    micro_batch: int | None,
    sequence_length: int | None,
    precision: Precision | None,
    with_graphs: bool = True,
) -> Program:
    """Return the program of a configuration; options that are given replace its keys.

    Without graphs it is read and built faster (`outline_program`). A note on stderr says that
    sequences of training may be shorter than those of the program.
    """
    if micro_batch is None:
        micro_batch = 1 if config.batch.micro == "auto" else config.batch.micro
    with collection_disabled(freeze=True):
        from penstock import planning

        # Only one of the two is imported: that with graphs imports all that traces.
        build_or_outline = planning.build_program if with_graphs else planning.outline_program
    program = build_or_outline(
        config,
        micro_batch=micro_batch,
        sequence_length=sequence_length,
        precision=precision.value if precision else config.precision,
    )
    tokens = program.values.get("input_ids")  # none in a model of the user's own
    if tokens is not None and sequence_length is None and planning.awaits_records(config):
        from penstock.prediction import most_tokens

        typer.echo(most_tokens(tokens.tensor.shape[1]), err=True)
    return program


def core_parameters(name: str) -> CoreParameters:
    """Return the costs of a core that `--cores` names.

    Raises:
        ConfigError: there is no such set, or a file that cannot be used.
    """
    from penstock.errors import ConfigError
    from penstock.wafer import load_parameters

    try:
        return load_parameters(name)
    except ConfigError as error:
        raise ConfigError(f"--cores: {error}") from None


def mesh_of(text: str) -> Mesh:
    """Return the mesh that `--mesh` names.

    Raises:
        ConfigError: it has no cores, or too many.
    """
    from penstock.errors import ConfigError
    from penstock.wafer import Mesh

    try:
        return Mesh.parse(text)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None
