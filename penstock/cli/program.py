"""`penstock program`: the stages that a model becomes, as a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.arguments import (
    MicroBatch,
    ModelArgument,
    Overrides,
    SequenceLength,
    WeightPrecision,
    build,
    configuration,
)
from penstock.errors import few, numbered
from penstock.progress import show_bytes, show_count, show_flops, show_sparsity

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.program import Program, Stage, WeightSpec


def program(
    model: ModelArgument,
    overrides: Overrides = None,
    micro_batch: MicroBatch = None,
    sequence_length: SequenceLength = None,
    precision: WeightPrecision = None,
    all_stages: Annotated[
        bool, typer.Option("--all", help="Print one line per stage; do not merge equal neighbours.")
    ] = False,
) -> None:
    """Show the program of MODEL: its stages, their weights, arithmetic and live values.

    No weights are created, so this works for a model of any size.
    """
    config = configuration(model, overrides)
    built = build(config, micro_batch, sequence_length, precision, with_graphs=False)

    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # A pipe has no width of its own to keep to.
    console.print(render(built, fold=not all_stages))
    if built.capacities:
        console.print(render_sparse(built))


def render(program: Program, fold: bool = True) -> Table:
    """Return a program as a table; with `fold`, equal neighbours share a line.

    Sizes on a line of several stages are those of one stage. `live` are the values between this
    stage and the next (with their number if it is not one; in the last line the maximum). `saved`
    are the values kept for backward besides a stage's inputs. Both are per micro-batch.
    """
    from rich import box
    from rich.table import Table

    table = Table(title=title(program), title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("stage", no_wrap=True)
    table.add_column("name", overflow="fold")  # the one that gives way where the terminal is narrow
    table.add_column("kind", no_wrap=True)
    sparse = ["sparsity"] if program.capacities else []
    headings = ("weights", *sparse, "streamed", "forward\nFLOP", "backward\nFLOP", "live", "saved")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    if _tied(program):
        table.caption = (
            "a tied weight is streamed with each of its stages, a gradient returns from each, and "
            "it is counted once in the total: gradients may have more bytes than the weights"
        )
    live = live_values(program)
    for stages in _lines(program, live, fold):
        first, last = stages[0], stages[-1]
        many = len(stages) > 1
        count, size = live[first.index]
        table.add_row(
            f"{first.index}-{last.index}" if many else str(first.index),
            names(first, last),
            f"{first.kind.name} x{len(stages)}" if many else first.kind.name,
            show_count(sum(w.elements for w in _weights(program, first))),
            *([_sparsity(_weights(program, first))] if sparse else []),
            show_bytes(program.stage_stream_bytes(first)),
            show_flops(first.kind.forward_flops),
            show_flops(first.kind.backward_flops),
            show_live(count, size),
            show_bytes(first.kind.saved_bytes),
        )
    table.add_section()
    kinds = len({stage.kind.digest for stage in program.stages})
    table.add_row(
        "",
        f"{numbered(len(program.stages), 'stage')} in all",
        f"{kinds} kinds",
        show_count(program.parameters),
        *([_sparsity(program.weights.values())] if sparse else []),
        show_bytes(sum(program.stage_stream_bytes(stage) for stage in program.stages)),
        show_flops(sum(stage.kind.forward_flops for stage in program.stages)),
        show_flops(sum(stage.kind.backward_flops for stage in program.stages)),
        show_bytes(max(size for _, size in live)),
        show_bytes(sum(stage.kind.saved_bytes for stage in program.stages)),
    )
    return table


def render_sparse(program: Program) -> Table:
    """Return a table of the sparse weights: a line for all that are computed in the same way.

    Bytes, operations and sparsity are those of the most entries that a weight has in the run.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title="sparse weights, with the most entries that they have",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for heading in ("weights", "shape", "sparsity", "streamed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("computed by", overflow="fold")
    table.add_column("names", overflow="fold")
    alike: dict[tuple[tuple[int, ...], int, str], list[str]] = {}
    for name, use in program.sparse_weights.items():
        spec = program.weights[name]
        alike.setdefault((spec.shape, spec.capacity, use.way), []).append(name)
    for (shape, _, way), found in alike.items():
        spec = program.weights[found[0]]
        table.add_row(
            str(len(found)),
            " x ".join(map(str, shape)),
            _sparsity([spec]),
            show_bytes(spec.stream_bytes),
            way,
            few(found, 2),
        )
    return table


def _sparsity(weights: Iterable[WeightSpec]) -> str:
    """Return the sparsity of the sparse ones among some weights, a dash if none is sparse."""
    sparse = [weight for weight in weights if weight.is_sparse]
    if not sparse:
        return "-"
    elements = sum(weight.elements for weight in sparse)
    return show_sparsity(1 - sum(weight.capacity for weight in sparse) / elements)


def title(program: Program) -> str:
    """Return the line above the table: the model and the inputs of one micro-batch."""
    inputs = ", ".join(
        f"{name} {list(program.values[name].tensor.shape)}" for name in program.inputs
    )
    return f"{program.name}: one micro-batch is {inputs}"


def names(first: Stage, last: Stage) -> str:
    """Return `transformer.h.0 ... 11` for a line of several stages, the name for one."""
    if first is last:
        return first.name
    prefix = first.name.rpartition(".")[0]
    shared = prefix and last.name.startswith(f"{prefix}.")
    return f"{first.name} ... {last.name[len(prefix) + 1 :] if shared else last.name}"


def show_live(count: int, size: int) -> str:
    """Return the bytes of live values, with their number where it is not one."""
    if count <= 1:
        return show_bytes(size) if count else "-"
    return f"{count}: {show_bytes(size)}"


def live_values(program: Program) -> list[tuple[int, int]]:
    """Return, per stage, how many stage-made values outlive it, and their bytes."""
    last_use = program.last_use()
    alive: dict[str, int] = {}
    result = []
    for stage in program.stages:
        alive.update((name, program.values[name].bytes) for name in stage.outputs)
        alive = {name: size for name, size in alive.items() if last_use[name] > stage.index}
        result.append((len(alive), sum(alive.values())))
    return result


def _lines(program: Program, live: list[tuple[int, int]], fold: bool) -> list[list[Stage]]:
    def key(stage: Stage) -> object:
        return (stage.kind.digest, live[stage.index]) if fold else stage.index

    return [list(group) for _, group in itertools.groupby(program.stages, key)]


def _weights(program: Program, stage: Stage) -> list:
    return [program.weights[name] for name in stage.weights]


def _tied(program: Program) -> bool:
    return sum(len(stage.weights) for stage in program.stages) > len(program.weights)
