"""The pictures of the literature on weight streaming, from the planner's own predictions.

Each function draws one picture into one or several files. Most of its time is the compilation of
large models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import Config
from penstock.errors import BudgetError, ConfigError
from penstock.machines import GpuCluster, MachineDescription
from penstock.pictures import new_figure, save
from penstock.prediction.gpu_cluster import Division
from penstock.prediction.planned import Planner
from penstock.prediction.predicted_run import RESOURCE_OF, Prediction
from penstock.progress import unit_of_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEQUENCE = 2048
ENGINES = (1, 2, 4, 8, 16, 32, 64, 128, 192)
FIXED_BATCH = 192
"""Sequences of the batch that the picture `gpus` holds fixed."""
FIXED_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 192)
_COMPARED = ("1.3B", "13B", "175B")
_MOST_SEQUENCES = 64  # per engine
_LEAST_SHOWN = 600  # bars beside each other, of a picture
_APART = (("o-", 9), ("s--", 5), ("^:", 3))  # styles of lines that may lie on each other, sizes
_COLOURS = {
    "compute": "#4c72b0",
    "update": "#dd8452",
    "receive gradients": "#c44e52",
    "weights out": "#55a868",
    "gradients in": "#8172b3",
    "flash read": "#937860",
    "flash write": "#da8bc3",
}

GPTS: Mapping[str, tuple[int, int, int]] = {
    "1.3B": (24, 2048, 16),
    "13B": (40, 5120, 40),
    "175B": (96, 12288, 96),
    "1T": (128, 25600, 160),
    "10T": (192, 65536, 512),
    "100T": (320, 163840, 1280),
}
"""Layers, width and heads of models in the architecture of GPT-2."""


def gpt(name: str, **changes: Any) -> Config:
    """Return the configuration of one of `GPTS`, in bf16, with sequences of 2048 tokens."""
    layers, width, heads = GPTS[name]
    model = {"preset": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads}
    return Config.from_mapping(
        {
            "model": {**model, "n_positions": SEQUENCE, "vocab_size": 50257},
            "precision": "bf16",
            "data": {"sequence_length": SEQUENCE},
            **changes,
        }
    )


def draw_memory(paths: Sequence[Path], planner: Planner) -> None:
    """Draw the memory of store and engine over the parameters of a model, up to 100 trillion.

    An engine computes one sequence, with every stage's forward computed again.
    """
    rows = []
    for name in GPTS:
        config = gpt(name, batch={"size": 1, "micro": 1}, engine={"recompute": "always"})
        found = planner.memory(config)
        rows.append((found.parameters, found.store_bytes, found.engine_bytes, found.stage_bytes))
    figure, axes = new_figure()
    labels = ("store: masters, moments, gradients", "one engine, one sequence", "largest stage")
    parameters = [row[0] for row in rows]
    for column, label in enumerate(labels, start=1):
        axes.plot(parameters, [row[column] for row in rows], "o-", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("parameters")
    axes.set_ylabel("bytes")
    axes.legend()
    axes.grid(alpha=0.3)
    save(figure, *paths)


def draw_scaling(paths: Sequence[Path], planner: Planner, machine: MachineDescription) -> None:
    """Draw the speed-up of several model sizes over engines, with as many sequences per engine: as
    many as fit. At the end of each line stands its share of linear."""
    figure, axes = new_figure()
    ends: list[tuple[float, int, str]] = []
    for name in _COMPARED:
        points = list(_scaled(planner, machine, name))
        if points:
            first = points[0][1]
            speeds = [found.tokens_per_second / first.tokens_per_second for _, found in points]
            label = f"{name}, {first.config.batch.size} x {SEQUENCE} tokens"
            count = points[-1][0]
            axes.plot([count for count, _ in points], speeds, "o-", label=label)
            ends.append((speeds[-1], count, f"{name}: {speeds[-1] / count:.1%}"))
    _name_ends(axes, ends)
    axes.plot(ENGINES, ENGINES, "--", color="gray", label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ENGINES, [str(count) for count in ENGINES])
    axes.set_yticks(ENGINES, [str(count) for count in ENGINES])
    axes.minorticks_off()
    axes.set_xlabel(f"engines of {machine.name}, data-parallel")
    axes.set_ylabel("tokens per second, relative to one engine")
    axes.legend(title="model, batch per engine")
    axes.grid(alpha=0.3)
    save(figure, *paths)


def _name_ends(axes: Axes, ends: Sequence[tuple[float, int, str]]) -> None:
    """Write the share of linear below the end of each line, the highest line's on top."""
    lines = zip(ends, axes.get_lines(), strict=True)
    highest_first = sorted(lines, key=lambda pair: pair[0], reverse=True)
    for row, ((speed, count, text), line) in enumerate(highest_first):
        axes.annotate(
            text,
            (count, speed),
            xytext=(4, -12 * row - 36),
            textcoords="offset points",
            ha="right",
            va="top",
            color=line.get_color(),
            fontsize="small",
        )


def _scaled(
    planner: Planner, machine: MachineDescription, name: str
) -> Iterator[tuple[int, Prediction]]:
    """Yield the predictions of a model on more and more engines, with the largest batch per engine
    that fits beside the share of a lost engine, or one sequence if that fits alone."""
    most = machine.engine.most or ENGINES[-1]

    def planned(engines: int, each: int) -> Prediction:
        return _planned(planner, machine, name, engines, each * engines)

    each = _MOST_SEQUENCES
    while each:
        with contextlib.suppress(BudgetError):
            several = min(2, most)
            has_room = planned(several, each).plan.least_engines < several
            if has_room or several == 1 or each == 1:
                break
        each //= 2
    for count in (count for count in ENGINES if each and count <= most):
        yield count, planned(count, each)


def _planned(
    planner: Planner, machine: MachineDescription, name: str, engines: int, sequences: int
) -> Prediction:
    """Return the prediction of a model, with micro-batches of one sequence and all the memory."""
    memory = {} if machine.engine.memory is None else {"memory": int(machine.engine.memory)}
    batch = {"size": sequences, "micro": 1}
    return planner.plan(gpt(name, engines=engines, batch=batch, engine=memory), machine)


def draw_timing(paths: Sequence[Path], prediction: Prediction) -> None:
    """Draw when each resource works in one step: weights, compute, gradients, updates, flash."""
    resources = list(prediction.busy["step"])
    unit, unit_seconds = unit_of_duration(prediction.step_seconds)
    length = prediction.step_seconds / unit_seconds
    least = length / _LEAST_SHOWN  # a thinner bar would not be drawn
    figure, axes = new_figure()
    for row, resource in enumerate(resources):
        pieces = [
            (
                begin := max(span.begin, 0.0) / unit_seconds,
                max(least, min(span.end / unit_seconds, length) - begin),
            )
            for span in prediction.spans
            if RESOURCE_OF.get(span.what) == resource
        ]
        axes.broken_barh(pieces, (row - 0.4, 0.8), color=_COLOURS[resource], linewidth=0)
    axes.set_yticks(range(len(resources)), resources)
    axes.invert_yaxis()
    axes.set_xlim(0, length)
    axes.set_xlabel(f"time in one step ({unit})")
    config, name = prediction.config, prediction.plan.program.name
    count = f"{config.engines} x " if config.engines > 1 else ""
    axes.set_title(f"{name}, {config.precision}, on {count}{prediction.machine.name}")
    save(figure, *paths)


def draw_gpus(
    paths: Sequence[Path],
    planner: Planner,
    machine: MachineDescription,
    cluster: GpuCluster,
) -> None:
    """Draw how many GPUs of a cluster with 3D parallelism take the time of so many engines, for a
    batch of fixed size. A line begins at the fewest engines that hold the batch, and ends where no
    number of GPUs is as fast. At its end stand the degrees of parallelism of the GPUs."""
    figure, axes = new_figure()
    ratio, styles = 0.0, iter(_APART)
    for name in _COMPARED:
        found = list(_equal_gpus(planner, machine, cluster, name))
        if not found:
            continue
        points = [(count, division.gpus) for count, division in found]
        style, size = next(styles)
        [line] = axes.plot(*zip(*points, strict=True), style, markersize=size, label=name)
        ratio = max(ratio, *(gpus / count for count, gpus in points))
        degrees = found[-1][1].degrees
        axes.annotate(
            f"{name}: tensor {degrees.tensor} x pipeline {degrees.pipeline} x data {degrees.data}",
            points[-1],
            xytext=(4, 8 if name == _COMPARED[0] else -12 * _COMPARED.index(name)),
            textcoords="offset points",
            ha="right",
            va="bottom" if name == _COMPARED[0] else "top",
            color=line.get_color(),
            fontsize="small",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over the dashed line
        )
    counts = [count for count in FIXED_COUNTS if count <= (machine.engine.most or count)]
    proportional = [ratio * count for count in counts]
    axes.plot(counts, proportional, "--", color="gray", label=f"{ratio:.0f} for each engine")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel(f"engines of {machine.name}, data-parallel")
    axes.set_ylabel(f"GPUs of {cluster.name} for the same time")
    axes.legend(title=f"model, {FIXED_BATCH} x {SEQUENCE} tokens in all")
    axes.grid(alpha=0.3)
    save(figure, *paths)


def _equal_gpus(
    planner: Planner, machine: MachineDescription, cluster: GpuCluster, name: str
) -> Iterator[tuple[int, Division]]:
    """Yield numbers of engines with the fewest GPUs that take the same time for the fixed batch,
    until no number of GPUs is as fast."""
    for count in FIXED_COUNTS:
        try:
            found = _planned(planner, machine, name, count, FIXED_BATCH)
        except (BudgetError, ConfigError):  # too few engines for the batch, or more than it has
            continue
        try:
            run = planner.plan_on_gpus(found.config, cluster, found.run_seconds)
        except ConfigError:
            return
        yield count, run.division
