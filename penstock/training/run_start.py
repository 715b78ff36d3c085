"""The start of a run: the files that it keeps, and the report before the first step."""

from typing import Any

from penstock.config import Config
from penstock.models import KEPT, ModelSource, buffer_files, config_files, keep_small_files
from penstock.planning import ExecutionPlan
from penstock.program import Program
from penstock.progress import show_count
from penstock.store import Store, kept_entries
from penstock.telemetry import RunStarted
from penstock.training.data_loading import TrainingData
from penstock.training.early_stop import EarlyStop
from penstock.training.predicted_steps import predicted_here


def keep_files_of_model(config: Config, model: ModelSource) -> None:
    """Copy what the run needs of a Hugging Face folder, which may be removed afterwards."""
    kept = config.run.dir / KEPT
    if model.folder is not None and model.folder != kept:
        buffers = buffer_files(model.buffers.stored())
        keep_small_files(model.folder, kept, config_files(model.config_file) | buffers)


def rows_per_step(config: Config, model: ModelSource, layout: ExecutionPlan) -> int:
    """Return the tokens of a step, or its rows for a model without tokens."""
    return config.batch.size * (layout.sequence_length if _reads_tokens(model) else 1)


def run_started(
    config: Config,
    model: ModelSource,
    layout: ExecutionPlan,
    store: Store,
    data: TrainingData,
    *,
    devices: str,
    resumed_from: int | None,
    early_stop: EarlyStop,
) -> RunStarted:
    """Return the event that starts a run."""
    program = layout.program
    samples = getattr(data.training, "samples_per_epoch", None)
    return RunStarted(
        run_dir=config.run.dir,
        model=model.name,
        parameters=program.parameters,
        trainable_parameters=program.trainable_parameters,
        weight_bytes=sum(weight.stream_bytes for weight in program.weights.values()),
        state_bytes=sum(store.memory_bytes.values()),
        flash_bytes=store.flash_bytes,
        flash_rule_read_bytes=store.flash_rule.read_bytes,
        flash_rule_written_bytes=store.flash_rule.written_bytes,
        engine_bytes=layout.budget_bytes,
        steps=config.run.steps,
        tokens_per_step=rows_per_step(config, model, layout),
        resumed_from=resumed_from,
        precision=config.precision,
        device=devices,
        micro_batch=layout.micro_batch,
        micro_batches=layout.micro_batches,
        recompute_stages=len(layout.plan.recompute),
        stages=len(program.stages),
        row_name="tokens" if _reads_tokens(model) else "rows",
        loss_unit="nats per token" if model.loss_reduction == "sum" else "",
        steps_per_epoch=samples / config.batch.size if samples else None,
        predicted=predicted_here(config, layout),
        best_loss=early_stop.best_loss,
        best_step=early_stop.best_step,
        **_masks(config, layout, store),
    )


def _masks(config: Config, layout: ExecutionPlan, store: Store) -> dict[str, Any]:
    """Return the part of the event that describes the sparse weights, if there are any."""
    if layout.sparse is None:
        return {}
    kept = kept_entries(store)
    return {
        "sparse_weights": len(kept),
        "sparse_entries": sum(kept.values()),
        "sparse_elements": sum(layout.sparse.elements.values()),
        "sparse_method": config.sparsity.method,
    }


def describe(config: Config, model: ModelSource, program: Program, step: int, devices: str) -> str:
    """Return a line that identifies a trainer among others."""
    return (
        f"<Trainer of {model.name}: {show_count(program.parameters)} parameters, step {step} of "
        f"{config.run.steps}, in {config.run.dir}, {config.precision} on {devices}>"
    )


def _reads_tokens(model: ModelSource) -> bool:
    return "input_ids" in model.inputs
