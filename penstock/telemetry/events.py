"""What a run tells those who watch it: the live view, the log, metrics, a notebook.

Events are plain data. `step` counts from 1 for the first completed step. Bytes are bytes,
seconds are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunStarted:
    """The run is about to do its first step.

    `trainable_parameters` of `parameters` are not frozen. `weight_bytes` is the size of all weights
    as they are streamed; `state_bytes` what the store takes of memory (masters, gradients,
    moments), `flash_bytes` what of flash; `engine_bytes` the engine's budget. `resumed_from` is the
    step that the run goes on from. `recompute_stages` of `stages` are computed again in the
    backward sweep. A step trains on `tokens_per_step` of `row_name`: tokens, or rows where a model
    does not read tokens. `loss_unit` is empty for a loss of the user's own, `steps_per_epoch` None
    where nothing says how large the training data is.
    `flash_rule_read_bytes` and `flash_rule_written_bytes` are what a step should move at most:
    state once each way, weights in twice and out once.
    """

    run_dir: Path
    model: str
    parameters: int
    trainable_parameters: int
    weight_bytes: int
    state_bytes: int
    engine_bytes: int
    steps: int
    tokens_per_step: int
    resumed_from: int | None
    precision: str
    device: str
    micro_batch: int
    micro_batches: int
    recompute_stages: int
    stages: int = 0
    flash_bytes: int = 0
    flash_rule_read_bytes: int = 0
    flash_rule_written_bytes: int = 0
    row_name: str = "tokens"
    loss_unit: str = "nats per token"
    steps_per_epoch: float | None = None


@dataclass(frozen=True)
class StepDone:
    """A step was committed. `engine_bytes` and `store_bytes` are the peak of the step.

    `streamed_bytes` went from the store to engines, `gradient_bytes` came back. `grad_norm` is
    before clipping, `clip_scale` the factor that clipping put on it (1 when it did not bind).

    The seconds of a step are those of five parts, one after another: `compute_seconds` the engines
    (and, on a GPU, waiting for them), `flash_wait_seconds` standing still for the flash tier,
    `weight_seconds` handing weights out and taking gradients in, `update_seconds` updates that
    were not made behind something else, `snapshot_seconds` updates held up by a checkpoint that
    was being written. `peak_rss_bytes` is the most memory that the process has had so far.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    clip_scale: float
    seconds: float
    tokens: int
    streamed_bytes: int
    gradient_bytes: int
    engine_bytes: int
    store_bytes: int
    flash_read_bytes: int = 0
    flash_written_bytes: int = 0
    flash_wait_seconds: float = 0.0
    compute_seconds: float = 0.0
    weight_seconds: float = 0.0
    update_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    peak_rss_bytes: int = 0


@dataclass(frozen=True)
class Evaluated:
    """The loss on held-out text after `step`; `best` when it is the least so far.

    Of language models, `perplexity`, and `accuracy`, the share of labelled tokens that the model
    thought most likely; None of others. `exact_match` is the share of records whose whole
    completion it had right; `bits_per_byte` the loss per byte of text, None where the loss is not
    that of text.
    """

    step: int
    loss: float
    perplexity: float | None
    seconds: float
    best: bool
    accuracy: float | None = None
    exact_match: float | None = None
    bits_per_byte: float | None = None

    @classmethod
    def of(cls, found: Mapping[str, float], step: int, seconds: float, best: bool) -> Evaluated:
        """Return the event of what `Trainer.evaluate` found after `step`."""
        more = (found.get(name) for name in ("accuracy", "exact_match", "bits_per_byte"))
        return cls(step, found["loss"], found.get("perplexity"), seconds, best, *more)


@dataclass(frozen=True)
class Saved:
    """A checkpoint is safely on disk."""

    step: int
    path: Path
    seconds: float
    bytes: int


@dataclass(frozen=True)
class ClusterEvent:
    """Something happened to the processes of a run: what kind of thing, and a line about it.

    `step` is the last step that was committed.
    """

    kind: str
    text: str
    node: int | None = None
    step: int = 0


@dataclass(frozen=True)
class Notice:
    """One sentence that the user should read; the run goes on."""

    text: str


@dataclass(frozen=True)
class RunMeasured:
    """What a run's steps cost, all together, told before it ends.

    `seconds` is the whole run, with evaluations and checkpoints; `step_seconds` its steps, and the
    other seconds are their parts as in `StepDone`; `streamed_bytes` and `gradient_bytes` are those
    of all steps. `memory_bytes` is the cap on the process, if
    there is one.
    """

    step: int
    steps: int
    seconds: float
    step_seconds: float
    compute_seconds: float
    flash_wait_seconds: float
    weight_seconds: float
    update_seconds: float
    snapshot_seconds: float
    flash_read_bytes: int
    flash_written_bytes: int
    flash_rule_read_bytes: int
    flash_rule_written_bytes: int
    checkpoint_bytes: int
    peak_rss_bytes: int
    memory_bytes: int | None = None
    streamed_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True)
class Stopped:
    """The run stopped before its last step, for `reason`, and saved; the command resumes it."""

    step: int
    reason: str
    resume_command: str


@dataclass(frozen=True)
class Finished:
    """The run is complete. `summary` holds its figures by name, each with its unit in the name."""

    summary: Mapping[str, Any] = field(default_factory=dict)


Event = (
    RunStarted
    | StepDone
    | Evaluated
    | Saved
    | Notice
    | ClusterEvent
    | RunMeasured
    | Stopped
    | Finished
)
Listener = Callable[[Event], None]


def broadcast(listeners: list[Listener]) -> Listener:
    """Return a listener that passes each event to all of them, in order."""

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell
