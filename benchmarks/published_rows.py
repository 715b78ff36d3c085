"""Does the planner say what was published of wafer-scale clusters?

Plans the published Cerebras-GPT models on the machine `cs2`, and asks for the published claims:
arithmetic of a training run, micro-batch, scaling to 192 engines, models of one and of a hundred
trillion parameters. Every row is printed as published, as predicted, with its source, and with the
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


@dataclass(frozen=True)
class Model:
    """A published training run: layers, width, heads, sequences of a step, steps, tokens, FLOPs,
    engines."""

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    steps: int
    flops: float
    engines: int


MODELS = (
    Model("111M", 10, 768, 12, 120, 9037, 2.5e18, 1),
    Model("256M", 14, 1088, 17, 264, 9468, 1.1e19, 1),
    Model("590M", 18, 1536, 12, 264, 21836, 5.3e19, 1),
    Model("1.3B", 24, 2048, 16, 528, 24334, 2.5e20, 4),
    Model("2.7B", 32, 2560, 32, 528, 49041, 9.8e20, 4),
    Model("6.7B", 32, 4096, 32, 1040, 62522, 5.9e21, 8),
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
        print(f"{'':34} {row.source}{'; ' + row.why if row.why else ''}", flush=True)
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
        settings = configured(model, micro=12 if quick else "auto")
        planned = planner.plan(settings, machine)
        flops = float(planned.flops) * model.steps
        yield Row(
            f"{model.name}: FLOPs of the run",
            f"{model.flops:.2g}",
            f"{flops:.2g}",
            CEREBRAS_GPT,
            flops / model.flops,
            0.1,
        )
        if quick:
            continue
        yield Row(
            f"{model.name}: sequences per engine",
            f"{model.batch // model.engines}",
            f"{planned.plan.micro_batch} x {-(-planned.plan.micro_batches // model.engines)}",
            CEREBRAS_GPT,
            why="Penstock calls a stage once per micro-batch, and an engine holds all of them",
        )
    if not quick:
        yield from scaling(planner, machine, MODELS[-1])


def scaling(planner: Any, machine: Any, model: Model) -> Iterator[Row]:
    """Yield the rows on scaling, with the published batch per engine."""
    each = model.batch // model.engines
    one = planner.plan(configured(model, 1, each), machine).tokens_per_second
    for engines, least in ((16, 0.91), (64, 0.85), (192, 0.85)):
        found = planner.plan(configured(model, engines, each * engines), machine)
        share = found.tokens_per_second / one / engines
        text = {16: "within 9 %", 64: "near-linear", 192: "near-linear, simulated"}[engines]
        yield Row(
            f"{model.name} on {engines} engines: of linear",
            text,
            f"{share:.1%}",
            CLUSTER,
            1.0 if share >= least else share,
            0.0,
            "with as many sequences per engine",
        )


def configured(
    model: Model,
    engines: int | None = None,
    batch: int | None = None,
    micro: int | str = "auto",
) -> Any:
    """Return the configuration of a published run."""
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
            "batch": {"size": batch or model.batch, "micro": micro},
            "engines": engines or model.engines,
            "run": {"steps": model.steps},
        }
    )


if __name__ == "__main__":
    main()
