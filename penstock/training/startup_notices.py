"""Notices before the first step of a run or of its continuation."""

import shlex
from collections.abc import Iterator

from penstock.config import Config, size_above
from penstock.engine import predict_bytes
from penstock.errors import few
from penstock.models import ModelSource
from penstock.planning import ExecutionPlan
from penstock.program import Program
from penstock.training.numerics import changed_numerics, numerics_here
from penstock.training.resume_state import ResumeState
from penstock.training.run_assembly import RunSetup


def notices_at_start(
    config: Config, setup: RunSetup, recorded: ResumeState | None
) -> Iterator[str]:
    """Yield what the user of a run should know before its next step.

    **Arguments:** `recorded` is the record of a run that is resumed.
    """
    if recorded is None:
        yield from _cautions(config, setup.model, setup.plan)
    elif changed := changed_numerics(recorded.numerics, numerics_here(config, setup.device)):
        yield changed


def _cautions(config: Config, source: ModelSource, layout: ExecutionPlan) -> Iterator[str]:
    """Yield one sentence per choice that the author of a model may not have intended."""
    yield from _unregistered(source)
    yield from _trained_in_eval_mode(source, layout.program)
    yield from _mean_of_means(config, source, layout)
    yield from _masks_that_never_change(config, layout)
    yield from _values_beyond_a_mesh(config, layout)


def all_steps_done(config: Config, step: int) -> str:
    """Return the notice that a run of `step` steps has all those of its configuration.

    Blocks on flash are compared with their checksums when they are read, so nothing has verified
    them yet; checkpoints of a store in memory have been read.
    """
    unverified = ""
    if config.store.flash.path is not None:
        unverified = (
            f". No checksum on flash was compared now: `penstock inspect "
            f"{shlex.quote(str(config.run.dir))}` verifies them all"
        )
    more = f", more than run.steps={config.run.steps}" if step > config.run.steps else ""
    return (
        f"the run already has {'' if more else 'its '}{step} steps{more}; nothing to do. To train "
        f"further: {config.more_steps(step)}{unverified}"
    )


def _unregistered(source: ModelSource) -> Iterator[str]:
    if names := source.structure.unregistered_weights():
        yield (
            f"{few(names)}: not trained, although a gradient is required: what a module keeps in "
            "buffers, plain tensors, lists or mappings is none of its parameters. To train it, "
            "assign an nn.Parameter or a module as an attribute, or use nn.ParameterList or "
            "nn.ModuleList; to keep it as it is, call .requires_grad_(False)"
        )


def _trained_in_eval_mode(source: ModelSource, program: Program) -> Iterator[str]:
    trained = {n for w in program.weights.values() if w.trainable for n in (w.name, *w.aliases)}
    paths = [
        path.removeprefix(source.weight_prefix) for path in source.structure.parts_in_eval_mode()
    ]
    parts = [path for path in paths if any(name.startswith(f"{path}.") for name in trained)]
    if parts:
        yield (
            f"{few(parts)}: given in eval mode and trained in eval mode, without dropout. To train "
            "in train mode, call .train() on the whole model before you pass it to the trainer"
        )


def _mean_of_means(config: Config, source: ModelSource, layout: ExecutionPlan) -> Iterator[str]:
    """Warn that a mean loss is computed per micro-batch, if `batch.micro` is `auto`."""
    divided = config.batch.micro == "auto" and layout.micro_batches > 1
    if divided and source.loss_reduction == "mean":
        size = config.batch.size
        yield (
            f"batch.micro: auto divides the batch of {size} rows into {layout.micro_batches} "
            f"micro-batches of {layout.micro_batch}, and the loss is the mean of their losses. "
            "This is the loss of the whole batch only if every row has the same weight. Otherwise "
            "(a mean over the tokens that have labels, a loss over pairs of rows), set "
            f"batch.micro: {size} for one loss over the batch, or another divisor of it"
        )


def _masks_that_never_change(config: Config, layout: ExecutionPlan) -> Iterator[str]:
    """Warn that a method which changes masks does not do so in this run."""
    if layout.sparse is None or config.sparsity.method == "static":
        return
    if layout.sparse.first_change(config.run.steps) is None:
        yield (
            f"sparsity: {config.sparsity.method} changes no mask in this run of "
            f"{config.run.steps} steps, with a change every {config.sparsity.update_every}; lower "
            "sparsity.update_every"
        )


def _values_beyond_a_mesh(config: Config, layout: ExecutionPlan) -> Iterator[str]:
    """Warn that a step keeps more than the cores of a simulated wafer have room for."""
    wafer = layout.plan.wafer
    if wafer is None:
        return
    mesh, core = wafer.options.mesh, wafer.options.core
    room = mesh.cores * (core.sram_bytes - core.reserved_bytes)
    each = -(-layout.micro_batches // config.engines)
    needs = predict_bytes(layout.program, each, layout.plan, layout.device).peak_bytes
    if needs > room:
        yield (
            f"engine.mesh: a step keeps up to {size_above(needs)} on an engine, and {mesh} cores "
            f"have room for {size_above(room)}. Every layer fits; cycles do not include moving "
            "what waits for the backward sweep elsewhere and back. Take a larger mesh, a smaller "
            "batch.size, or engine.recompute: always"
        )
