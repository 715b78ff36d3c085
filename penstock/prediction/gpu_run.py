"""The prediction of a run on a conventional GPU cluster, with its best division found by search."""

from dataclasses import dataclass
from typing import Any

from penstock.config import Config
from penstock.errors import BudgetError, ConfigError
from penstock.machines import GpuCluster
from penstock.prediction.gpu_cluster import Degrees, Division, ModelFigures
from penstock.prediction.parallel_search import best_division, fewest_gpus
from penstock.prediction.planned_length import most_tokens
from penstock.prediction.run_price import RunPrice, price_of_gpus
from penstock.progress import show_bytes, show_count, show_duration

THREE_D = (0, 1)
"""ZeRO stages of 3D parallelism as in Megatron-LM: at most the optimizer state is shared."""


@dataclass(frozen=True)
class GpuRun:
    """What a run will do on a GPU cluster.

    Attributes:
        config: of the run, whose `engines` are the GPUs.
        model: its name.
        cluster: on which it runs.
        figures: of the model.
        division: among the GPUs: the one with the shortest step.
        length_note: why training may take shorter sequences; None if their length is known.
    """

    config: Config
    model: str
    cluster: GpuCluster
    figures: ModelFigures
    division: Division
    length_note: str | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.division.step_seconds

    @property
    def run_seconds(self) -> float:
        """Seconds of all steps, without evaluation and checkpoints."""
        return self.config.run.steps * self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs."""
        return self.figures.batch_tokens / self.step_seconds

    @property
    def price(self) -> RunPrice:
        """What the GPUs cost and draw."""
        return price_of_gpus(self.cluster, self.division.gpus)

    @property
    def engine_bytes(self) -> int:
        """Memory of the fullest GPU."""
        return int(self.division.memory_bytes)

    @property
    def binding(self) -> str:
        """The largest part of a step's time."""
        return max(parts := self.parts, key=lambda name: parts[name])

    @property
    def parts(self) -> dict[str, float]:
        """The parts of a step's time in seconds."""
        found = self.division
        return {
            "compute": found.compute_seconds,
            "communication": found.exposed_seconds,
            "pipeline bubble": found.bubble_seconds,
            "update": found.update_seconds,
        }

    def as_json(self) -> dict[str, Any]:
        """Return the prediction in numbers: seconds, bytes, US dollars, watts."""
        return {
            "machine": self.cluster.name,
            "model": self.model,
            "parameters": self.figures.parameters,
            "gpus": self.division.gpus,
            "degrees": vars(self.division.degrees),
            "batch_size": self.config.batch.size,
            "sequence_length": self.figures.sequence_length,
            "sequence_length_note": self.length_note,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "run_seconds": self.run_seconds,
            "gpu_bytes": self.engine_bytes,
            "gpu_limit_bytes": self.division.limit_bytes,
            "parts": self.parts,
            "cost_per_hour": self.price.dollars_per_hour,
            "watts": self.price.watts,
        }

    def lines(self) -> list[str]:
        """Return the prediction in sentences."""
        found, title = self.division, self.cluster.title
        shares = ", ".join(
            f"{name} {seconds / self.step_seconds:.0%}"
            for name, seconds in self.parts.items()
            if seconds >= 0.005 * self.step_seconds
        )
        return [
            f"{self.model}, {show_count(self.figures.parameters)} parameters, "
            f"{self.config.precision}, on {found.gpus:,} GPUs of {self.cluster.name}"
            f"{f' ({title})' if title else ''}",
            *([most_tokens(self.figures.sequence_length)] if self.length_note else []),
            f"The best division: {describe(found.degrees)}.",
            f"Memory of the fullest GPU: {show_bytes(self.engine_bytes)} of "
            f"{show_bytes(found.limit_bytes)}.",
            f"One step takes {show_duration(self.step_seconds)}: "
            f"{show_count(self.tokens_per_second)} tokens/s; {shares}.",
            f"{self.config.run.steps:,} steps take {show_duration(self.run_seconds)}.",
            "These are the formulas of Megatron-LM's authors, with a cluster at its best: the "
            "steps that they published took up to 20 % longer.",
        ]


def gpu_run(
    config: Config,
    model: str,
    figures: ModelFigures,
    cluster: GpuCluster,
    seconds: float | None = None,
) -> GpuRun:
    """Return the best run on a cluster.

    Args:
        config: of the run, whose `engines` are the GPUs.
        model: its name.
        figures: of the model.
        cluster: the cluster.
        seconds: of the whole run; the fewest GPUs that make it are then taken, whatever `engines`.

    Raises:
        BudgetError: no division among so many GPUs fits.
        ConfigError: a number of GPUs that the cluster cannot have, or a time that none reaches.
    """
    if seconds is not None:
        step = seconds / config.run.steps
        found = fewest_gpus(figures, cluster, step_seconds=step, zero_stages=THREE_D)
        config = config.model_copy(update={"engines": found.gpus})
        return GpuRun(config, model, cluster, figures, found)
    division = best_division(figures, cluster, config.engines, zero_stages=THREE_D)
    if division is None:
        raise BudgetError(_why_none(config, model, figures, cluster))
    return GpuRun(config, model, cluster, figures, division)


def describe(degrees: Degrees) -> str:
    """Return a division in words."""
    parts = [
        f"tensor {degrees.tensor} x pipeline {degrees.pipeline} x data {degrees.data}",
        f"micro-batches of {degrees.micro_batch}",
        f"ZeRO stage {degrees.zero}" if degrees.zero else "no ZeRO",
    ]
    if degrees.chunks > 1:
        parts.append(f"{degrees.chunks} parts of the pipeline per GPU")
    if degrees.recompute:
        parts.append("activations computed again")
    return ", ".join(parts)


def _why_none(config: Config, model: str, figures: ModelFigures, cluster: GpuCluster) -> str:
    text = (
        f"engines: no division of {model} with batch.size {config.batch.size} among "
        f"{config.engines:,} GPUs of {cluster.name} fits their memory"
    )
    try:
        least = fewest_gpus(figures, cluster, step_seconds=float("inf"), zero_stages=THREE_D)
    except ConfigError:
        return f"{text}, and no other number of GPUs does; choose a smaller model or another batch"
    return f"{text}; the fewest GPUs that do are {least.gpus:,} ({describe(least.degrees)})"
