"""The demo's table of results, from the run's metrics and the exported model alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from penstock.config import Config
from penstock.errors import StorageError
from penstock.progress import show_bytes, show_duration
from penstock.telemetry import read_metrics

_FIELDS = {
    "step": {
        *("seconds", "tokens", "loss", "streamed_bytes", "gradient_bytes"),
        *("store_bytes", "engine_bytes"),
    },
    "evaluation": {"seconds", "loss"},
    "report": {"seconds", "steps"},
}


def metrics_of(config: Config) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics that have all that is shown of them."""
    rows = read_metrics(config.run.dir / "metrics.jsonl")
    return [
        row for row in rows if row.get("event") in _FIELDS and _FIELDS[row["event"]] <= row.keys()
    ]


def trained_steps(config: Config) -> int | None:
    """Return the newest step in the metrics of a run; None if there is none."""
    return max((row["step"] for row in metrics_of(config)), default=None)


def figures(config: Config, exported: Path) -> Table | None:
    """Return the table: speed, loss, bytes streamed and predicted, memory, time; None if the
    metrics have no steps.

    Raises:
        StorageError: the exported model is damaged.
    """
    rows = metrics_of(config)
    steps = [row for row in rows if row["event"] == "step"]
    evaluations = [row for row in rows if row["event"] == "evaluation"]
    if not steps:
        return None
    first, last = steps[0], steps[-1]
    step_seconds = sum(row["seconds"] for row in steps)
    speed = sum(row["tokens"] for row in steps) / (step_seconds or math.inf)
    most_out, _ = traffic_by_the_rule(exported, 2 if config.precision == "bf16" else 4)

    table = Table(title=f"{config.run.dir}, {last['step']} steps", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    table.add_row("speed", f"{speed:,.0f} tokens/s", "over all steps")
    if first["step"] == 1:
        loss = shown_loss(first)
        table.add_row("loss, step 1", loss, "of the first batch, by the untrained model")
    for row in evaluations[-1:]:
        bits = row.get("bits_per_byte")
        table.add_row(
            f"held-out loss, step {row['step']}",
            shown_loss(row),
            "" if bits is None else f"{bits:.3f} bits per byte",
        )
    table.add_row(
        "traffic per step",
        show_bytes(last["streamed_bytes"] + last["gradient_bytes"]),
        f"{show_bytes(last['streamed_bytes'])} of weights are sent to the engine, for the forward "
        f"and again for the backward pass (at most {show_bytes(most_out)}), and "
        f"{show_bytes(last['gradient_bytes'])} of gradients are returned once, whatever the number "
        "of micro-batches",
    )
    table.add_row(
        "store",
        show_bytes(last["store_bytes"]),
        "weights, gradients and optimizer state",
    )
    table.add_row(
        "engine at its peak",
        show_bytes(max(row["engine_bytes"] for row in steps)),
        "activations of a step, and the stages in transit",
    )
    table.add_row(
        "time",
        show_duration(training_seconds(rows)),
        f"{show_duration(step_seconds)} of it in steps",
    )
    return table


def shown_loss(row: Mapping[str, Any]) -> str:
    """Return the loss of a step or an evaluation; null means that it was not finite."""
    return "not finite" if row["loss"] is None else f"{row['loss']:.3f} nats per token"


def training_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the training time of a run, with evaluations and checkpoints, from its metrics.

    Each start of the run reports its time at its end. A killed process reports nothing; its steps
    and evaluations count one by one.
    """
    reports = [row for row in rows if row["event"] == "report"]
    reported = {step for r in reports for step in range(r["step"] - r["steps"] + 1, r["step"] + 1)}
    alone = [
        row["seconds"]
        for row in rows
        if row["event"] in ("step", "evaluation") and row["step"] not in reported
    ]
    return sum(row["seconds"] for row in reports) + sum(alone)


def traffic_by_the_rule(exported: Path, bytes_per_number: int) -> tuple[int, int]:
    """Return the bytes of weights and of gradients that a step may move, from the shapes alone.

    Reads only the shapes in the exported files, not Penstock's counters. The table of token
    embeddings is in the first stage and, as the head's matrix, in the last. Weights are sent twice,
    those of the last stage once. The result is an upper bound: weights that a stage's backward does
    not read, such as a bias or the embedding table, are sent once. Gradients are sent once, in
    float32.
    """
    from safetensors import SafetensorError, safe_open

    numbers = {"wte": 0, "wpe": 0, "h": 0, "ln_f": 0}
    for path in sorted(exported.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    part = name.removeprefix("transformer.").split(".")[0]
                    numbers[part] += math.prod(file.get_slice(name).get_shape())
        except (SafetensorError, OSError, KeyError) as error:
            raise StorageError(
                f"{path} is damaged ({error}); delete {exported}: the next start exports the model "
                "again"
            ) from error
    all_but_last = numbers["wte"] + numbers["wpe"] + numbers["h"]
    last = numbers["ln_f"] + numbers["wte"]
    return (2 * all_but_last + last) * bytes_per_number, (all_but_last + last) * 4
