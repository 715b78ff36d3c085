"""Does the planner say what was published of wafer-scale clusters?

Plans the published Cerebras-GPT models on the machine `cs2`, and asks for the published claims:
arithmetic of a training run, sequences of a pass over the weights, parameters of a store, scaling
to 192 engines, time for models of one and of a hundred trillion parameters, and GPUs for ten times
the speed of 16. Every row is printed as published, as predicted, with its source, and with the
reason where the two differ. Nothing is fitted to a row.

    python benchmarks/published_rows.py [--quick]

`value` is the share of rows with a published number that the prediction meets within the row's
tolerance. --quick counts the arithmetic of the two smallest models.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from contract import describe_machine, print_result

CEREBRAS_GPT = "Dey et al. 2023, Cerebras-GPT (arXiv:2304.03208), table 1 and section 2"
CLUSTER = "Cerebras, Andromeda and Wafer-Scale Cluster, 2022"
LENGTH, VOCABULARY = 2048, 50257
TOKENS = 300e9  # of a run whose publication names none: those of GPT-3
SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class Model:
    """A published training run: layers, width, heads, sequences of a step, steps, FLOPs, engines,
    and sequences that an engine computes in one pass over the weights."""

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    steps: int
    flops: float
    engines: int
    each: int


MODELS = (
    Model("111M", 10, 768, 12, 120, 9037, 2.5e18, 1, 120),
    Model("256M", 14, 1088, 17, 264, 9468, 1.1e19, 1, 264),
    Model("590M", 18, 1536, 12, 264, 21836, 5.3e19, 1, 264),
    Model("1.3B", 24, 2048, 16, 528, 24334, 2.5e20, 4, 132),
    Model("2.7B", 32, 2560, 32, 528, 49041, 9.8e20, 4, 132),
    Model("6.7B", 32, 4096, 32, 1040, 62522, 5.9e21, 8, 65),
    # 57,000 steps of 720 sequences and 78,223 of 1080, as steps of 720
    Model("13B", 40, 5120, 40, 720, 174335, 2.1e22, 8, 90),
)
QUICK = 2


@dataclass(frozen=True)
class Row:
    """A published figure and the predicted one; `tolerance` is relative, None if the published
    figure is no number."""

    what: str
    published: str
    predicted: str
    source: str
    ratio: float | None = None
    tolerance: float | None = None
    why: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the figures agree; None where there is no number."""
        if self.ratio is None or self.tolerance is None:
            return None
        return abs(self.ratio - 1) <= self.tolerance


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the two smallest models")
    options = parser.parse_args()
    rows = []
    for row in published(options.quick):
        rows.append(row)
        mark = {True: "met", False: "NOT met", None: ""}[row.is_met]
        print(f"{row.what:34} published {row.published:>14}  ours {row.predicted:>14}  {mark}")
        why = f"; {row.why}" if row.why and not row.is_met else ""
        print(f"{'':34} {row.source}{why}", flush=True)
    judged = [row.is_met for row in rows if row.is_met is not None]
    print_result(
        "published_rows",
        value=round(sum(judged) / len(judged), 3),
        target=1.0,
        unit="share of published numbers that are met",
        rows=[vars(row) for row in rows],
        machine=describe_machine(),
    )


def published(quick: bool) -> Iterator[Row]:
    """Yield all rows; with `quick` the arithmetic of the two smallest models alone."""
    from penstock.machines import load_machine
    from penstock.prediction import Planner

    planner, machine = Planner(), load_machine("cs2")
    for model in MODELS[:QUICK] if quick else MODELS:
        yield from published_run(planner, machine, model, quick)
    if not quick:
        yield store_row(planner)
        yield from scaling(planner, machine, MODELS[3])
        yield from giants(planner, machine)
        yield gpu_row(planner)


def published_run(planner: Any, machine: Any, model: Model, quick: bool) -> Iterator[Row]:
    """Yield the arithmetic of a published run, and the sequences of a pass."""
    planned, passes = fitting(planner, machine, model)
    flops = float(planned.flops) * passes * model.engines * model.steps
    yield Row(
        f"{model.name}: FLOPs of the run",
        f"{model.flops:.2g}",
        f"{flops:.2g}",
        CEREBRAS_GPT,
        flops / model.flops,
        0.1,
        "attention is counted over all pairs of tokens, the embedding's look-up as nothing; the "
        "published counts are met within 5 % if the look-up counts as a product",
    )
    if not quick:
        each = model.batch // model.engines // passes
        yield Row(
            f"{model.name}: sequences of an engine's pass",
            f"{model.each}",
            f"{each}",
            CEREBRAS_GPT,
            each / model.each,
            0.0,
            "the largest part of an engine's share of a step that its memory holds. The inputs of "
            "all stages stay there in bf16, beside sums of gradients: for the published number "
            f"{model.each * LENGTH * model.layers * model.width * 2 / 1e9:.0f} GB "
            "of inputs alone",
        )


def fitting(planner: Any, machine: Any, model: Model) -> tuple[Any, int]:
    """Return the prediction of one engine's pass over the weights, and the number of passes of a
    step: the least that fits."""
    from penstock.errors import BudgetError

    share = model.batch // model.engines
    for passes in (n for n in range(1, share + 1) if share % n == 0):
        settings = configured(model, machine, 1, share // passes)
        try:
            return planner.plan(settings, machine), passes
        except BudgetError as error:
            problem = error
    raise problem


def store_row(planner: Any) -> Row:
    """Return how many parameters the largest store holds."""
    from penstock.machines import load_machine

    found = planner.memory(large("100T", 1, 1))
    each = found.store_bytes / found.parameters
    most = int(load_machine("cs2").store.memory) / each
    return Row(
        "parameters in a store of 2.4 PB",
        "120 T",
        f"{most / 1e12:.0f} T",
        CLUSTER,
        most / 120e12,
        0.3,
        f"{each:.1f} bytes per parameter in bf16 with AdamW: master and two moments in float32, "
        "the gradient in bf16. The published 120 T in 2.4 PB make 20 bytes",
    )


def scaling(planner: Any, machine: Any, model: Model) -> Iterator[Row]:
    """Yield the rows on scaling, with half the published batch per engine."""
    each = model.each // 2
    one = planner.plan(configured(model, machine, 1, each), machine).tokens_per_second
    for engines, least in ((16, 0.91), (64, 0.85), (192, 0.85)):
        found = planner.plan(configured(model, machine, engines, each * engines), machine)
        share = found.tokens_per_second / one / engines
        text = {16: "within 9 %", 64: "near-linear", 192: "near-linear, simulated"}[engines]
        yield Row(
            f"{model.name} on {engines} engines: of linear",
            text,
            f"{share:.1%}",
            CLUSTER,
            1.0 if share >= least else share,
            0.0,
            f"with {each} sequences per engine, half of the published: Penstock keeps room for the "
            "share of as many lost engines",
        )


def giants(planner: Any, machine: Any) -> Iterator[Row]:
    """Yield the time for models of a trillion and of a hundred trillion parameters."""
    from penstock.errors import BudgetError

    rate = machine.engine.speed.curve("product", "bfloat16").at(float("inf"))
    anywhere = machine.model_copy(
        update={"engine": machine.engine.model_copy(update={"most": None})}
    )
    for name, engines, text, days in (
        ("1T", 192, "a few days", 7.0),
        ("100T", 1000, "about a year", 365.0),
    ):
        memory = planner.memory(large(name, 1, 1))
        flops = 6 * memory.parameters * TOKENS
        least = flops / engines / rate / SECONDS_PER_DAY
        try:
            sequences = max(1, int(machine.engine.memory) // memory.engine_bytes)
            settings = large(name, engines, sequences, int(machine.engine.memory))
            found = planner.plan(settings, anywhere)
            took = TOKENS / found.tokens_per_second / SECONDS_PER_DAY
            ours = f"{took:,.0f} days"
            why = (
                f"{TOKENS / 1e9:.0f} G tokens; the products alone take {least:,.0f} days at the "
                f"rate of the description. An engine holds {sequences} sequences, too few to hide "
                f"the stream: {found.binding('step')} binds"
            )
        except BudgetError:
            took, ours = least, f"{least:,.0f} days of products"
            why = (
                f"{TOKENS / 1e9:.0f} G tokens; the products alone. One sequence of {LENGTH} tokens "
                f"needs {memory.engine_bytes / 1e9:,.0f} GB, an engine has 40"
            )
        yield Row(f"{name} on {engines} engines", text, ours, CLUSTER, took / days, 0.5, why)


def gpu_row(planner: Any) -> Row:
    """Return how many GPUs are ten times as fast as 16."""
    from penstock.machines import load_gpu_cluster

    cluster = load_gpu_cluster("a100-cluster")
    settings = configured(MODELS[-1], None, 16, 1024)
    one = planner.plan_on_gpus(settings, cluster)
    many = planner.plan_on_gpus(settings, cluster, one.run_seconds / 10)
    return Row(
        "GPUs that are 10 times as fast as 16",
        "800",
        f"{many.division.gpus}",
        "Cerebras, weak scaling of GPU clusters, 2022",
        many.division.gpus / 800,
        0.5,
        "the described cluster is at its best: no stragglers, and the degrees are searched; "
        "which model and cluster the published figure is of was not found",
    )


def large(name: str, engines: int, sequences: int, memory: int | None = None) -> Any:
    """Return the configuration of a large model, with so many sequences per engine."""
    from penstock.prediction.figures import gpt

    return gpt(
        name,
        engines=engines,
        batch={"size": engines * sequences, "micro": 1},
        engine={"recompute": "always"} | ({} if memory is None else {"memory": memory}),
    )


def configured(model: Model, machine: Any, engines: int, batch: int) -> Any:
    """Return the configuration of a published run, with all of an engine's memory."""
    from penstock.config import Config

    return Config.from_mapping(
        {
            "model": {
                "preset": "gpt2",
                "n_layer": model.layers,
                "n_embd": model.width,
                "n_head": model.heads,
                "n_positions": LENGTH,
                "vocab_size": VOCABULARY,
            },
            "precision": "bf16",
            "data": {"sequence_length": LENGTH},
            "batch": {"size": batch, "micro": 1},
            "engine": {} if machine is None else {"memory": int(machine.engine.memory)},
            "engines": engines,
            "run": {"steps": model.steps},
        }
    )


if __name__ == "__main__":
    main()
