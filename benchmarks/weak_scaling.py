"""How far does one run scale when every further engine brings its own share of the batch?

The nodes that run on a cluster (`penstock/fabric/nodes`) run here in a simulated network with the
rates of real links, from 1 to 192 engines, each with the same number of sequences. Messages have
sizes and no content. What an operation takes comes from the program that Penstock makes of the
model: its arithmetic at the rate of the engine, its weights and optimizer state at the rate of the
store's memory. Three questions: what a shard sends per step (it must not depend on the number of
engines), how long a step takes in which nothing is computed (it may grow with the logarithm), and
the time of a step on one engine over that on N.

    python benchmarks/weak_scaling.py [--quick] [--plot weak_scaling.png]

`value` is the lesser share of a target: of 0.99 on 192 CS-2 and of 0.95 on 192 GPUs; at least 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from penstock.assembly import build_program
from penstock.config import Config
from penstock.fabric.nodes import Conductor, EngineNode, Leases, Outcome, Part, ShardNode
from penstock.fabric.sim import Links, Network
from penstock.fabric.transfers import GRADIENT_WIDTH, Operation, Piece, Transfers, chunks
from penstock.program import Program
from penstock.tree import TreeNode

MODEL, SEQUENCE_LENGTH = "gpt3-13b", 2048
ENGINES = [1, 2, 4, 8, 16, 32, 64, 128, 192]
QUICK_ENGINES = [1, 8, 192]
STEPS = 2  # the last one counts
FIRST_ENGINE = 1000
CHUNKS = 8  # of an operation's weights: larger ones than a real run's, which is the harder case
UPDATE_BYTES = 32  # AdamW reads and writes three float32 numbers, reads a gradient, writes weights
ROW_BYTES = 16  # of a token, input and target


@dataclasses.dataclass(frozen=True)
class Machine:
    """An engine, its link, and the shards that serve it."""

    name: str
    links: Links
    flops: float  # that an engine reaches, per second
    weight_width: int  # bytes of a streamed weight
    shards: int
    store_bytes_per_second: float  # of one shard's memory
    sequences: int  # per engine and step
    tried: tuple[int, ...]  # other numbers of sequences, on 192 engines
    target: float


MACHINES = [
    # Peak of the wafer at 1.1 GHz, the fastest that is quoted: nothing hides better behind it.
    # The vendor's tree of switches is left out; wafers hand weights on over their own links.
    Machine("CS-2, 1.2 Tb/s", Links(150e9, 1e-5), 7.5e15, 4, 1, 4e12, 240, (60, 120), 0.99),
    # 40 % of the H200's peak in bf16.
    Machine("H200, 100 Gb/s", Links(12.5e9, 2e-5), 4e14, 2, 4, 300e9, 64, (16, 32), 0.95),
]


class Engine:
    """Computes nothing, and knows how long that takes."""

    def __init__(self, program: Program, machine: Machine, sequences: int) -> None:
        kinds = [stage.kind for stage in program.stages]
        rate = machine.flops / sequences if sequences else math.inf
        self._forward = [kind.forward_flops / rate for kind in kinds]
        self._backward = [kind.backward_flops / rate for kind in kinds]
        self.seconds, self._first = 0.0, 0

    def begin(self, step: int, part: Mapping[str, float], rows: Mapping[str, np.ndarray]) -> None:
        self._first, self.seconds = int(part["first"]), 0.0

    def place(self, operation: Operation, piece: Piece, payload: np.ndarray | None) -> None:
        """The bytes were left out."""

    def compute(self, operation: Operation) -> list[TreeNode]:
        forward, backward = self._forward[operation.stage], self._backward[operation.stage]
        if operation.sweep == "forward":
            self.seconds = forward
            return []
        self.seconds = forward + backward  # backward computes again what it needs
        elements = max((piece.end for piece in operation.gradients), default=0)
        return [TreeNode(0, self._first, (torch.empty(elements, device="meta"),))]

    def losses(self) -> list[float]:
        return [0.0]


class Shard:
    """Holds nothing, and knows how long reading and updating it takes."""

    def __init__(self, machine: Machine, transfers: Transfers, shard: int) -> None:
        self._rate, self._shard, self._step = machine.store_bytes_per_second, shard, 0
        self._transfers, self.seconds = transfers, 0.0

    def held_steps(self) -> list[int]:
        return [self._step]

    def go_back(self, step: int) -> None:
        self.seconds = 0.0

    def settle(self) -> None:
        """Nothing is awaited."""

    def begin(self, step: int) -> None:
        self.seconds = 0.0

    def fetch(self, operation: Operation) -> list[None]:
        numbers = operation.of_shard(self._shard)
        pieces = [operation.weights[number] for number in numbers]
        size = sum(piece.size for piece in pieces)
        if operation.sweep != "backward":  # the update of the step before comes first
            size += sum(piece.end - piece.begin for piece in pieces) * UPDATE_BYTES
        self.seconds = size / self._rate
        return [None] * len(numbers)

    def receive(self, operation: Operation, gradients: Mapping[int, object]) -> None:
        pieces = [operation.gradients[number] for number in gradients]
        self.seconds = (
            sum(piece.end - piece.begin for piece in pieces) * GRADIENT_WIDTH / self._rate
        )

    def prepare(self) -> dict:
        self.seconds = 0.0
        return {}

    def commit(self, step: int, decision: Mapping[str, object]) -> dict:
        self._step, self.seconds = step, 0.0
        return {}


@dataclasses.dataclass
class Order:
    """A step in which every engine has one micro-batch: sums of more stay on the engine."""

    step: int
    micro_batches: int
    row_bytes: int

    def parts(self, engines: int) -> list[Part]:
        rows = {"x": np.zeros(self.row_bytes, np.uint8)}
        body = {"total": engines, "seed": 0, "scale": 1.0}
        return [Part({**body, "first": place}, rows) for place in range(engines)]

    def decide(self, losses: Sequence[float], prepared: Sequence[Mapping]) -> dict:
        return {}


def transfers_of(program: Program, machine: Machine, most: float = math.inf) -> Transfers:
    """Return the operations of a step; a stage's weights lie one behind the other.

    Args:
        most: of every stage, no more than so many weights.
    """
    stages, shards = program.stages, machine.shards
    order = [(stage, "forward") for stage in stages[:-1]] + [(stages[-1], "turn")]
    order += [(stage, "backward") for stage in reversed(stages[:-1])]
    operations = []
    for number, (stage, sweep) in enumerate(order):
        elements = sum(program.weights[name].elements for name in stage.weights)
        elements = int(min(most, elements))
        bounds = [elements * shard // shards for shard in range(shards + 1)]
        made = []
        for width in (machine.weight_width, GRADIENT_WIDTH):
            pieces = [Piece(s, 0, bounds[s], bounds[s + 1], width) for s in range(shards)]
            made.append(chunks(pieces, -(-elements // CHUNKS) * width))
        gradients = () if sweep == "forward" else made[1]
        operations.append(Operation(number, stage.index, sweep, made[0], gradients))
    return Transfers(tuple(operations), shards)


@dataclasses.dataclass
class Measured:
    """What one step took and moved."""

    seconds: float
    store_sent: int
    store_taken: int
    most_sent: int  # by any engine
    messages: int


def measure(
    machine: Machine, program: Program, transfers: Transfers, engines: int, sequences: int
) -> Measured:
    """Make a few steps and return the last."""
    shards = range(1, 1 + machine.shards)
    members = range(FIRST_ENGINE, FIRST_ENGINE + engines)
    works: dict[int, Engine | Shard] = {}
    network = Network(machine.links, cost=lambda number: works[number].seconds, beat=1.0)
    leases = Leases(silence=1e3, stall=1e4, job=1e5)
    conductor = Conductor(
        network.runtime(0), [(n,) for n in shards], engines, leases, lambda event: None
    )
    for place, number in enumerate(shards):
        shard = works[number] = Shard(machine, transfers, place)
        runtime = network.runtime(number)
        network.add(number, ShardNode(number, place, runtime, transfers, shard))
    for number in members:
        engine = works[number] = Engine(program, machine, sequences)
        network.add(number, EngineNode(number, network.runtime(number), transfers, engine))
        conductor.joined(number)
    network.conduct(conductor)
    rows = sequences * SEQUENCE_LENGTH * ROW_BYTES
    for step in range(1, STEPS + 1):
        ended: list[Outcome] = []
        began, messages = network.now, network.delivered
        sent, taken = dict(network.sent_bytes), dict(network.taken_bytes)
        conductor.start(Order(step, engines, rows), ended.append)
        network.run(lambda ended=ended: bool(ended), math.inf)
        if ended[0].error is not None:
            raise ended[0].error
    return Measured(
        network.now - began,
        sum(network.sent_bytes[n] - sent[n] for n in shards),
        sum(network.taken_bytes[n] - taken[n] for n in shards),
        max(network.sent_bytes[n] - sent[n] for n in members),
        network.delivered - messages,
    )


def main() -> None:
    """Measure both machines over the numbers of engines, and draw what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few numbers of engines, one batch")
    parser.add_argument("--plot", type=Path, default=Path("weak_scaling.png"), help="a picture")
    arguments = parser.parse_args()
    numbers = QUICK_ENGINES if arguments.quick else ENGINES
    began = time.perf_counter()
    gc.disable()  # a simulation makes millions of small objects and no cycles
    program = build_program(
        Config.from_mapping({"model": MODEL}, []),
        micro_batch=1,
        sequence_length=SEQUENCE_LENGTH,
        precision="fp32",
    )
    curves = [curve(machine, program, numbers, arguments.quick) for machine in MACHINES]
    drawn = draw(curves, arguments.plot)
    shares = [found["efficiency"][-1] / found["target"] for found in curves]
    print(
        json.dumps(
            {
                "benchmark": "weak_scaling",
                "value": round(min(shares), 4),
                "target": 1.0,
                "unit": "lesser share of the target efficiency on 192 engines",
                "quick": arguments.quick,
                "model": MODEL,
                "seconds": round(time.perf_counter() - began, 1),
                "plot": drawn,
                "machines": curves,
            }
        )
    )


def curve(machine: Machine, program: Program, numbers: Sequence[int], quick: bool) -> dict:
    """Measure one machine over numbers of engines, print the table and return its figures."""
    transfers = transfers_of(program, machine)
    # Next to no bytes, nothing computed, memory without a limit: what is left is latency.
    idle = dataclasses.replace(machine, store_bytes_per_second=math.inf)
    small = transfers_of(program, machine, 256)
    print(
        f"{MODEL}, {machine.name}: {machine.flops / 1e12:,.0f} TFLOP/s, "
        f"{machine.sequences} x {SEQUENCE_LENGTH} tokens per engine, {machine.shards} shard(s)"
    )
    print(
        f"{'engines':>8} {'step s':>9} {'efficiency':>10} {'store sends':>12} {'idle step ms':>12}"
    )
    made, latency = [], []
    for engines in numbers:
        made.append(measure(machine, program, transfers, engines, machine.sequences))
        latency.append(measure(idle, program, small, engines, 0).seconds)
        print(
            f"{engines:8} {made[-1].seconds:9.4f} {made[0].seconds / made[-1].seconds:10.4f}"
            f" {made[-1].store_sent / 1e9:9.3f} GB {latency[-1] * 1e3:12.3f}",
            flush=True,
        )
    sent = {step.store_sent for step in made} | {transfers.weight_bytes}
    taken = {step.store_taken for step in made} | {transfers.gradient_bytes}
    if len(sent) > 1 or len(taken) > 1:
        raise RuntimeError(f"the store's traffic depends on the engines: {sent}, {taken}")
    slope, worst = logarithm(numbers, latency)
    print(f"an idle step takes {slope * 1e3:.3f} ms more per doubling, to {worst:.1%} of the last")
    found = {
        "machine": machine.name,
        "flops_per_second": machine.flops,
        "sequences_per_engine": machine.sequences,
        "tokens_per_engine": machine.sequences * SEQUENCE_LENGTH,
        "target": machine.target,
        "engines": list(numbers),
        "step_seconds": [step.seconds for step in made],
        "efficiency": [round(made[0].seconds / step.seconds, 4) for step in made],
        "store_sent_bytes": made[-1].store_sent,
        "store_taken_bytes": made[-1].store_taken,
        "most_sent_by_an_engine_bytes": [step.most_sent for step in made],
        "idle_step_seconds": latency,
        "seconds_per_doubling": slope,
        "logarithm_misses_by": worst,
        "other_batches": {},
    }
    for sequences in () if quick else machine.tried:
        one, all_of_them = (
            measure(machine, program, transfers, engines, sequences).seconds
            for engines in (1, numbers[-1])
        )
        found["other_batches"][sequences] = round(one / all_of_them, 4)
        print(f"with {sequences} sequences per engine: {one / all_of_them:.4f} on {numbers[-1]}")
    return found


def logarithm(numbers: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the seconds per doubling of the engines, and how far the worst point is off the line.

    The distance is a share of the last point. A tree's depth is a whole number, so that steps of
    one level are as near to a line as it can be.
    """
    x, y = np.log2(numbers), np.asarray(seconds)
    slope, begin = np.polyfit(x, y, 1)
    return float(slope), float(np.abs(begin + slope * x - y).max() / y[-1])


def draw(curves: Sequence[Mapping], path: Path) -> str | None:
    """Draw efficiency, traffic and latency; without matplotlib, say how to get it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no picture: pip install 'penstock[plot]' to have one")
        return None
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for found, colour in zip(curves, ("tab:blue", "tab:orange"), strict=True):
        engines, name = found["engines"], found["machine"]
        tokens = f"{found['tokens_per_engine'] / 1000:.0f}k tokens per engine"
        left.plot(engines, found["efficiency"], "o-", color=colour, label=f"{name}, {tokens}")
        left.axhline(found["target"], color=colour, linestyle=":")
        sent = found["store_sent_bytes"] / 1e9
        middle.plot(engines, [sent] * len(engines), "o-", color=colour, label=f"{name}: store")
        busiest = [size / 1e9 for size in found["most_sent_by_an_engine_bytes"]]
        middle.plot(engines, busiest, "x--", color=colour, label=f"{name}: busiest engine")
        idle = [1e3 * seconds for seconds in found["idle_step_seconds"]]
        right.plot(engines, idle, "o-", color=colour, label=name)
    left.set(title="Step on one engine / step on N (dotted: target)", ylim=(0.9, 1.005))
    middle.set(title="Sent per step, GB", ylim=(0, 1.4 * middle.get_ylim()[1]))  # for the legend
    right.set(title="Step with nothing to compute or carry, ms", ylim=(0, None))
    for axis in (left, middle, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 2, 4, 8, 16, 32, 64, 128, 192], [1, 2, 4, 8, 16, 32, 64, "", 192])
        axis.set_xlabel("engines")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(f"{MODEL}: the batch grows with the number of engines")
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")
    return str(path)


if __name__ == "__main__":
    main()
