"""The events of a run, for its listeners: the live view, the log, metrics, a notebook.

Events are plain data. `step` counts from 1 for the first completed step. Sizes are in bytes, times
in seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST_STEPS = 2
"""The first steps of a process take longest: they compile kernels, the second those of updates."""


@dataclass(frozen=True)
class PredictedStep:
    """What the planner predicted of a step; the parts of `seconds` are those of `StepDone`.

    `host_was_busy` is 1 if the rates behind the prediction were measured while the host was busy,
    else 0.
    """

    seconds: float
    compute_seconds: float
    weight_seconds: float
    update_seconds: float
    flash_wait_seconds: float
    streamed_bytes: int
    gradient_bytes: int
    flash_read_bytes: int
    flash_written_bytes: int
    # of the process; 0 if the run has others too, and in files of older versions
    peak_memory_bytes: int = 0
    host_was_busy: int = 0


@dataclass(frozen=True)
class RunStarted:
    """The run is about to execute its first step.

    `trainable_parameters` of the `parameters` are not frozen. `weight_bytes` is the size of all
    weights as streamed. `state_bytes` is the store's memory (masters, gradients, moments),
    `flash_bytes` its size on flash, `engine_bytes` the engine's budget. `resumed_from` is the step
    from which the run continues. `recompute_stages` of the `stages` are recomputed in the backward
    sweep. A step trains on `tokens_per_step` of `row_name`: tokens, or rows for a model without
    tokens. `loss_unit` is empty for a loss of the user's own. `steps_per_epoch` is None if the size
    of the training data is unknown. `flash_rule_read_bytes` and `flash_rule_written_bytes` are the
    most that a step should transfer: state once each way, weights read twice and written once.
    `sparse_weights` of the weights are sparse, with `sparse_entries` entries out of
    `sparse_elements` at the start; `sparse_method` names how their masks change. `predicted` is the
    planner's prediction of a step; None if this host was not measured by `penstock calibrate`.
    `best_loss` is the best held-out loss of the run so far and `best_step` its step. Both are None
    before the first evaluation; `best_step` is None if an older version has recorded the loss.
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
    sparse_weights: int = 0
    sparse_entries: int = 0
    sparse_elements: int = 0
    sparse_method: str = ""
    predicted: PredictedStep | None = None
    best_loss: float | None = None
    best_step: int | None = None


@dataclass(frozen=True)
class StepCycles:
    """What a step would have taken on a wafer-scale engine, in cycles of its cores.

    `closed_form` come from formulas, `simulated` from the simulator of the mesh; a step takes both.
    `mesh` is the number of rows and columns of cores, `cores` the name of their parameters.
    `stages` has the same for each stage, by name and sweep: `forward`, `backward`, and `turn` for
    both of the last stage.
    """

    mesh: str
    cores: str
    clock_hz: float
    closed_form: float
    simulated: float
    stages: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepDone:
    """A step was committed.

    `engine_bytes` is the peak memory of an engine since its process started, `store_bytes` the
    memory of the store after the step.

    `streamed_bytes` went from the store to engines; `gradient_bytes` came back. `grad_norm` is
    measured before clipping. `clip_scale` is the clipping factor (1 without clipping).

    The time of a step is the sum of five parts. `compute_seconds` is the computation of the engines
    (and, on a GPU, the wait for them). `flash_wait_seconds` is the wait for the flash tier.
    `weight_seconds` is the transfer of weights and gradients from and to the store.
    `update_seconds` is the time of updates that did not overlap other work. `snapshot_seconds` is
    the delay of updates by a running checkpoint. `peak_rss_bytes` is the peak memory of the process
    so far.

    `flash_speculated_bytes` of weights and state were updated before the commit and adopted by it,
    `flash_discarded_bytes` were updated before the commit in vain.

    `flops` is the arithmetic of the step's forward and backward sweeps, without recomputation; a
    multiply-add counts as two, and a sparse weight's products by the entries that exist. Of a run
    with sparse weights, `sparsity` is the share of their entries that do not exist after the step,
    and `changed_entries` the number that the step's commit has dropped or grown; `sparsity` is None
    for other runs. `cycles` is None on every device but a simulated wafer.
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
    flops: int = 0
    sparsity: float | None = None
    changed_entries: int = 0
    cycles: StepCycles | None = None
    flash_speculated_bytes: int = 0
    flash_discarded_bytes: int = 0


@dataclass(frozen=True)
class Compiling:
    """Kernels are compiled after `step`, or another process compiles them and this one waits.

    `again` is true for those that are compiled later than others of the same run.
    """

    step: int
    again: bool = False


@dataclass(frozen=True)
class Evaluating:
    """The evaluation after `step` begins its `batch`, counted from 1, of `batches`."""

    step: int
    batch: int
    batches: int


@dataclass(frozen=True)
class Evaluated:
    """The loss on held-out data after `step`; `best` if it is the lowest so far.

    `perplexity` and `accuracy` (the share of labelled tokens that the model ranked first) are for
    language models, and None for other models. `exact_match` is the share of records whose whole
    completion was correct. `bits_per_byte` is the loss per byte of text, None if the data is not
    text or an older release built the data set.
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
        """Return the event for the result of `Trainer.evaluate` after `step`."""
        more = (found.get(name) for name in ("accuracy", "exact_match", "bits_per_byte"))
        return cls(step, found["loss"], found.get("perplexity"), seconds, best, *more)


@dataclass(frozen=True)
class Saved:
    """A checkpoint is durable."""

    step: int
    path: Path
    seconds: float
    bytes: int


@dataclass(frozen=True)
class ClusterEvent:
    """An event of the run's processes: its kind, and one line of text.

    `step` is the last step that was committed. `engines` is the number of engines that the run
    wants, if the event has changed it.
    """

    kind: str
    text: str
    node: int | None = None
    step: int = 0
    engines: int | None = None


@dataclass(frozen=True)
class Notice:
    """One sentence that the user should read; the run continues."""

    text: str


@dataclass(frozen=True)
class RunMeasured:
    """The total cost of a run's steps, sent before the run ends.

    `seconds` is the whole run, with evaluations and checkpoints. `step_seconds` is the time of all
    steps; the other seconds are its parts as in `StepDone`. `streamed_bytes` and `gradient_bytes`
    are sums over all steps. `memory_bytes` is the cap on the process, if any. `flops` is the
    arithmetic of all steps, `sparsity` that after the last step, both as in `StepDone`. `predicted`
    is what the planner predicted of a step, if it could. `usual_step_seconds` is the median time of
    the usual steps: those after the first ones of the process that change no mask, if there are
    any, else all; 0 in files of older versions. `usual_parts` are the mean seconds of these steps
    by the name of the part, such as `compute_seconds`; empty there. `unusual_steps` is the number
    of the other steps. `others_share` is the share of this machine's cores that other programs
    took after the first steps, `stolen_share` that which its hypervisor gave to others; 0 if
    unknown.
    `closed_form_cycles` and `simulated_cycles` are sums over all steps of `StepCycles`, whose cores
    have `clock_hz`; 0 on every device but a simulated wafer.
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
    flops: int = 0
    sparsity: float | None = None
    predicted: PredictedStep | None = None
    usual_step_seconds: float = 0.0
    closed_form_cycles: float = 0.0
    simulated_cycles: float = 0.0
    clock_hz: float = 0.0
    flash_speculated_bytes: int = 0
    flash_discarded_bytes: int = 0
    usual_parts: Mapping[str, float] = field(default_factory=dict)
    unusual_steps: int = 0
    others_share: float = 0.0
    stolen_share: float = 0.0


@dataclass(frozen=True)
class Stopped:
    """The run stopped before its last step, for `reason`, and saved its state."""

    step: int
    reason: str
    resume_command: str


@dataclass(frozen=True)
class Finished:
    """The run is complete. `summary` holds its metrics by name, with the unit in each name.

    `summary["steps"]` are those of this call of `train`, `step` is the number of the last step of
    the run; 0 if unknown.
    """

    summary: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0


Event = (
    RunStarted
    | StepDone
    | Compiling
    | Evaluating
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
    """Return a listener that passes each event to all listeners, in order, and one event at a
    time: threads may call it."""
    one_at_a_time = threading.RLock()

    def tell(event: Event) -> None:
        with one_at_a_time:
            for listener in listeners:
                listener(event)

    return tell
