"""How far does one run scale when every further engine brings its own share of the batch?

The nodes that run on a cluster (`penstock/distributed/protocol`) run here in a simulated network
with the rates of real links, from 1 to 192 engines, each with the same number of sequences.
Messages have sizes and no content. A batch counts only if it fits the memory of an engine by the
account that a run is refused by; every stage is then recomputed. Between shards and engines are as
many relays as `fabric.relays: auto` takes, and rows are sent a step ahead. Three questions: what a
shard sends per step (it must not depend on the number of engines), how long a step takes in which
nothing is computed (it may grow with the logarithm), and the time of a step on one engine over that
on N.

    python benchmarks/weak_scaling.py [--quick | --whole] [--only TEXT] [--plot FILE]

`value` is the least share of a target: of 0.99 on 192 CS-2 and of 0.95 on 192 GPUs; at least 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from contract import describe_machine, print_result
from simulated_cluster import (
    CHECK,
    CS2,
    FEW,
    H200,
    MORE,
    SOCKET_BYTES_PER_SECOND,
    Load,
    Machine,
    Measured,
    difference,
    fit,
    measure,
    repeated,
    transfers_of,
)
from simulated_cluster.picture import draw

from penstock.config import Config
from penstock.distributed.simulation import Links
from penstock.errors import BudgetError
from penstock.models import ModelSource
from penstock.planning import builders, model_sources
from penstock.program import Program

ENGINES = [1, 2, 4, 8, 16, 32, 64, 128, 192]
QUICK_ENGINES = [1, 8, 192]


@dataclasses.dataclass(frozen=True)
class Goal:
    """An efficiency that is to be reached with the most engines."""

    machine: Machine
    load: Load
    target: float


# The most sequences that fit a wafer. Blocks of 175B are cut in two, as a run does where a stage
# does not fit.
GOALS = [
    Goal(CS2, Load("gpt3-1.3b", "bf16", 160, chunks=64, relays="auto"), 0.99),
    Goal(CS2, Load("gpt3-13b", "bf16", 24, chunks=256, relays="auto"), 0.99),
    Goal(
        CS2,
        Load("gpt3-175b", "bf16", 1, chunks=256, relays="auto", slot_bytes=2_500_000_000),
        0.99,
    ),
    Goal(H200, Load("gpt3-13b", "bf16", 64, chunks=16, relays="auto"), 0.95),
    Goal(H200, Load("llama-70b", "bf16", 42, chunks=16, relays="auto"), 0.95),
]
IDLE_WEIGHTS = 256  # of a stage, in a step that measures latency
QUICK_LAYERS = 2  # with which the ends of a step weigh more, and less is simulated

# The link that this implementation has today, as measured between two processes of one machine.
SOCKETS = dataclasses.replace(
    H200,
    name=f"H200, our sockets at {SOCKET_BYTES_PER_SECOND / 1e9} GB/s",
    links=Links(SOCKET_BYTES_PER_SECOND, H200.links.latency),
)

# What else was tried on the most engines: the same without relays and with fewer, coarser chunks,
# a batch that does not fit, less to compute, a slower link.
OTHERS = [
    (CS2, Load("gpt3-1.3b", "bf16", 160, chunks=64)),
    (CS2, Load("gpt3-13b", "bf16", 24, chunks=64)),
    (CS2, Load("gpt3-13b", "bf16", 24, chunks=64, relays="auto")),
    (CS2, Load("gpt3-13b", "bf16", 24, chunks=64, relays=64)),
    (CS2, Load("gpt3-13b", "bf16", 24, chunks=64, relays=193)),
    (CS2, Load("gpt3-13b", "fp32", 16)),
    (CS2, Load("gpt3-175b", "bf16", 1, slot_bytes=2_500_000_000)),
    (H200, Load("gpt3-13b", "bf16", 64, chunks=16)),
    (H200, Load("llama-70b", "bf16", 42, chunks=16)),
    (H200, Load("gpt3-13b", "bf16", 32, chunks=16)),
    (H200, Load("gpt3-13b", "bf16", 32, chunks=16, relays="auto")),
    (SOCKETS, Load("gpt3-13b", "bf16", 64, chunks=16)),
    (SOCKETS, Load("gpt3-13b", "bf16", 64, chunks=16, relays="auto")),
]


def main() -> None:
    """Measure both machines over the numbers of engines, and other loads on the most."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few numbers of engines, no others")
    parser.add_argument("--plot", type=Path, help="draw the curves there")
    parser.add_argument("--only", default="", help="only loads whose description contains this")
    parser.add_argument("--whole", action="store_true", help="simulate every layer of a model")
    arguments = parser.parse_args()
    numbers = QUICK_ENGINES if arguments.quick else ENGINES
    began = time.perf_counter()
    only = arguments.only.lower()
    goals = [g for g in GOALS if only in f"{g.machine.name}: {g.load.model}".lower()]
    if not goals:
        parser.error(f"--only: no load contains {arguments.only!r}")
    if arguments.quick:
        goals = [quick(goal) for goal in goals]
    others = [] if arguments.quick or arguments.only else OTHERS
    # Every simulation is one thread's work, and none needs another's result.
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=gc.disable) as workers:
        points = [
            [
                workers.submit(point, goal.machine, goal.load, engines, arguments.whole)
                for engines in numbers
            ]
            for goal in goals
        ]
        checks = [
            None
            if arguments.quick or arguments.whole
            else workers.submit(layer_difference, goal.machine, goal.load, numbers[-1])
            for goal in goals
        ]
        tried = [
            workers.submit(try_out, machine, load, numbers[-1], arguments.whole)
            for machine, load in others
        ]
        curves = []
        for goal, made, check in zip(goals, points, checks, strict=True):
            found = curve(goal, [each.result() for each in made])
            found["layer_difference"] = check.result() if check is not None else None
            curves.append(show_curve(found))
        shown = [show(made.result()) for made in tried]
    drawn = draw(curves, arguments.plot) if arguments.plot is not None else None
    shares = [found["efficiency"][-1] / found["target"] for found in curves]
    print_result(
        "weak_scaling",
        round(min(shares), 4),
        target=1.0,
        unit=f"least share of the target efficiency on {numbers[-1]} engines",
        machine=describe_machine(),  # of the simulation: it changes no figure
        quick=arguments.quick,
        whole=arguments.whole,
        seconds=round(time.perf_counter() - began, 1),
        plot=drawn,
        machines=curves,
        others=shown,
    )


def quick(goal: Goal) -> Goal:
    """Return a goal with few layers: less is simulated, and the ends of a step weigh more."""
    return dataclasses.replace(goal, load=dataclasses.replace(goal.load, layers=QUICK_LAYERS))


@functools.cache
def _source_of(load: Load) -> ModelSource:
    of_llama = load.model.startswith("llama")
    changes = {} if of_llama else {"n_positions": load.length}
    if load.layers is not None:
        changes["num_hidden_layers" if of_llama else "n_layer"] = load.layers
    config = Config.from_mapping({"model": {"preset": load.model, **changes}}, [])
    assert config.model is not None
    return model_sources.model_source(config.model)


@functools.cache
def program_of(load: Load) -> Program:
    """Return the program of a load, for micro-batches of one of its sequences."""
    return builders.compile_source(
        _source_of(load),
        micro_batch=1,
        length=load.length,
        precision=load.precision,
        with_buffers=False,
        slot_bytes=load.slot_bytes,
    )


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on a number of engines, and one in which nothing is computed and little sent."""

    engines: int
    relays: int
    step: Measured
    idle_seconds: float


def point(machine: Machine, load: Load, engines: int, whole: bool = False) -> Point:
    """Return the steps of a load on a number of engines.

    Args:
        machine: what each engine is.
        load: what each engine does; it fits the engine.
        engines: how many there are.
        whole: whether every layer is simulated.
    """
    relays = load.relays_of(engines)
    step = _step(machine, load, engines, relays, whole=whole)
    return Point(
        engines, relays, step, _step(machine, load, engines, relays, whole=whole, idle=True).seconds
    )


def layer_difference(machine: Machine, load: Load, engines: int) -> float:
    """Return by which share the time of further layers differs, where layers are repeated."""
    relays = load.relays_of(engines)
    return difference(lambda layers: _step_of_layers(machine, load, engines, relays, layers))


def _step(
    machine: Machine,
    load: Load,
    engines: int,
    relays: int,
    *,
    whole: bool = False,
    idle: bool = False,
) -> Measured:
    """Return a step of a load with all its layers."""

    def measure_layers(layers: int) -> Measured:
        return _step_of_layers(machine, load, engines, relays, layers, idle)

    layers = _source_of(load).hf_config.num_hidden_layers
    return measure_layers(layers) if whole else repeated(measure_layers, layers)


def _step_of_layers(
    machine: Machine, load: Load, engines: int, relays: int, layers: int, idle: bool = False
) -> Measured:
    """Return a step of a load with so many of its layers, all stages recomputed.

    If `idle`, nothing is computed, next to no bytes are sent, and the store's memory has no limit:
    what is left is latency.
    """
    load = dataclasses.replace(load, layers=layers)
    program = program_of(load)
    recompute = fit(machine, program, load)[0].recompute
    sequences, most = load.sequences, math.inf
    if idle:
        machine = dataclasses.replace(machine, store_bytes_per_second=math.inf)
        sequences, most = 0, IDLE_WEIGHTS
    transfers = transfers_of(program, machine, recompute, load.chunks, most)
    size = sequences, load.length, recompute
    return measure(machine, program, transfers, engines, *size, relays)


def curve(goal: Goal, points: Sequence[Point]) -> dict:
    """Return the figures of one machine over numbers of engines.

    Args:
        goal: the machine, and what each engine does.
        points: the steps, the first of them on one engine.

    **Raises:** `BudgetError` where the load does not fit an engine.
    """
    machine, load = goal.machine, goal.load
    program = program_of(load)
    plan, engine_bytes = fit(machine, program, load)
    transfers = transfers_of(program, machine, plan.recompute, load.chunks)
    sent = {each.step.store_sent for each in points} | {transfers.weight_bytes}
    taken = {each.step.store_taken for each in points} | {transfers.gradient_bytes}
    if len(sent) > 1 or len(taken) > 1:
        raise RuntimeError(f"the store's traffic depends on the engines: {sent}, {taken}")
    numbers, latency = [each.engines for each in points], [each.idle_seconds for each in points]
    slope, worst = logarithm(numbers, latency)
    one = points[0].step.seconds
    return _described(machine, load) | {
        "flops_per_second": machine.flops,
        "engine_bytes": engine_bytes,
        "target": goal.target,
        "engines": numbers,
        "relays": [each.relays for each in points],
        "step_seconds": [each.step.seconds for each in points],
        "efficiency": [round(one / each.step.seconds, 4) for each in points],
        "store_sent_bytes": points[-1].step.store_sent,
        "store_taken_bytes": points[-1].step.store_taken,
        "most_sent_by_an_engine_bytes": [each.step.most_sent for each in points],
        "most_taken_by_an_engine_bytes": [each.step.most_taken for each in points],
        "idle_step_seconds": latency,
        "seconds_per_doubling": slope,
        "logarithm_misses_by": worst,
    }


def show_curve(found: dict) -> dict:
    """Print the table of a curve, and return it."""
    print(f"{_line(found)}; {found['flops_per_second'] / 1e12:,.0f} TFLOP/s")
    print(
        f"{'engines':>8} {'relays':>7} {'step s':>9} {'efficiency':>10} {'store sends':>12}"
        f" {'idle step ms':>12}"
    )
    keys = ("engines", "relays", "step_seconds", "efficiency", "idle_step_seconds")
    for engines, relays, seconds, share, idle in zip(*(found[key] for key in keys), strict=True):
        print(
            f"{engines:8} {relays:7} {seconds:9.4f} {share:10.4f}"
            f" {found['store_sent_bytes'] / 1e9:9.3f} GB {idle * 1e3:12.3f}"
        )
    slope, worst = found["seconds_per_doubling"], found["logarithm_misses_by"]
    print(
        f"an idle step takes {slope * 1e3:.3f} ms more per doubling, to {worst:.1%} of the last",
        flush=True,
    )
    if found["layer_difference"] is not None:
        print(
            f"{found['engines'][-1]} engines: layers {MORE} to {CHECK} take"
            f" {found['layer_difference']:+.3%} longer than layers {FEW} to {MORE}",
            flush=True,
        )
    return found


def try_out(machine: Machine, load: Load, engines: int, whole: bool = False) -> dict:
    """Return the efficiency of a load on so many engines; none if it does not fit.

    Args:
        machine: what each engine is.
        load: what each engine does.
        engines: how many there are, compared with one.
        whole: whether every layer is simulated.
    """
    found = _described(machine, load)
    try:
        _, engine_bytes = fit(machine, program_of(load), load)
    except BudgetError as error:
        return found | {"does_not_fit": str(error), "engine_bytes": None, "efficiency": None}
    relays = load.relays_of(engines)
    one = _step(machine, load, 1, 0, whole=whole).seconds
    most = _step(machine, load, engines, relays, whole=whole).seconds
    return found | {
        "engines": engines,
        "relays": relays,
        "engine_bytes": engine_bytes,
        "efficiency": round(one / most, 4),
    }


def show(found: dict) -> dict:
    """Print a line about a load that was tried, and return it."""
    if found["efficiency"] is None:
        print(f"{_line(found)}: {found['does_not_fit']}", flush=True)
    else:
        where = f"{found['engines']} with {found['relays']} relays"
        print(f"{_line(found)}: {found['efficiency']:.4f} on {where}", flush=True)
    return found


def _described(machine: Machine, load: Load) -> dict:
    return {
        "machine": machine.name,
        "model": load.model,
        "precision": load.precision,
        "sequences_per_engine": load.sequences,
        "tokens_per_sequence": load.length,
        "tokens_per_engine": load.tokens,
        "most_chunks": load.chunks,
        "layers": load.layers,
        "memory_bytes": machine.memory_bytes,
    }


def _line(found: dict) -> str:
    needs = found["engine_bytes"]
    fits = "does not fit" if needs is None else f"{needs / 1e9:.1f}"
    return (
        f"{found['machine']}: {found['model']}, {found['precision']}, "
        f"{found['sequences_per_engine']} x {found['tokens_per_sequence']} tokens per engine, "
        f"{fits} of {found['memory_bytes'] / 1e9:g} GB"
    )


def logarithm(numbers: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the seconds per doubling of the engines, and how far the worst point is off the line.

    The distance is a share of the last point. A tree's depth is a whole number, so that steps of
    one level are as near to a line as it can be.
    """
    x, y = np.log2(numbers), np.asarray(seconds)
    slope, begin = np.polyfit(x, y, 1)
    return float(slope), float(np.abs(begin + slope * x - y).max() / y[-1])


if __name__ == "__main__":
    main()
