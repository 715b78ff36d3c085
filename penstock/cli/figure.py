"""`penstock plan figure`: the pictures of the literature, from the planner's predictions."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.arguments import Overrides, Pictures, configuration
from penstock.errors import ConfigError, did_you_mean

_FIGURES = {
    "memory": "memory over parameters, to 100 trillion",
    "scaling": "speed of three model sizes over engines",
    "timing": "one step of {config}: weights, compute, gradients, updates",
    "gpus": "GPUs of a 3D-parallel cluster for the time of so many engines",
}


def figure(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(_FIGURES)}.")],
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="Of `timing`: preset, .yaml, or config.json."),
    ] = None,
    overrides: Overrides = None,
    machine: Annotated[
        str, typer.Option(metavar="NAME", help="Known machine or machine file.")
    ] = "cs2",
    cluster: Annotated[
        str, typer.Option(metavar="NAME", help="Of `gpus`: known GPU cluster, or a file.")
    ] = "a100-cluster",
    out: Pictures = None,
) -> None:
    """Draw a picture: memory, scaling, timing or gpus. Compiling large models takes a minute."""
    if name not in _FIGURES:
        raise ConfigError(
            f"expected a figure, one of {', '.join(_FIGURES)}, got {name!r}"
            f"{did_you_mean(name, list(_FIGURES))}"
        )
    if name == "timing" and config is None:
        raise ConfigError("timing: expected a configuration, for example: plan figure timing gpt2")
    if name != "timing" and config is not None:
        raise ConfigError(
            f"{name}: expected no configuration, got {config!r}; it draws its own models"
        )

    from penstock.machines import load_gpu_cluster, load_machine
    from penstock.pictures import check_name
    from penstock.prediction import (
        Planner,
        draw_gpus,
        draw_memory,
        draw_scaling,
        draw_timing,
    )

    paths = out or [Path(f"{name}.png")]
    for path in paths:
        check_name(path)
    planner, described = Planner(remember=True), load_machine(machine)
    if name == "memory":
        draw_memory(paths, planner)
    elif name == "scaling":
        draw_scaling(paths, planner, described)
    elif name == "gpus":
        draw_gpus(paths, planner, described, load_gpu_cluster(cluster))
    else:
        assert config is not None
        settings = configuration(config, overrides)
        prediction = planner.plan(settings, described)
        if prediction.length_note is not None:
            typer.echo(f"note: {prediction.length_note}", err=True)
        draw_timing(paths, prediction)
    for path in paths:
        typer.echo(f"{path}: {_FIGURES[name].format(config=config)}")
