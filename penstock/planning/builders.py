"""Builders from a configuration to the parts of a run: model, program, data, store, engines.

Each function builds one part; the trainer combines the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from penstock.compiler import (
    CompileOptions,
    Precision,
    Products,
    compile_module,
    refuse_gradient_hooks,
)
from penstock.config import Config
from penstock.engine import target_of
from penstock.kernels.processor import Processor
from penstock.models import ModelSource
from penstock.planning.model_sources import source_of
from penstock.planning.program_cache import Request, cached_program
from penstock.planning.selected_weights import kept_as_bfloat16, sparse_weights_of
from penstock.planning.sequence_lengths import shown_length
from penstock.program import Program

if TYPE_CHECKING:
    from penstock.engine import Engine, EnginePlan, SparseWeights
    from penstock.planning.memory_shares import MemoryShares

Goal = Literal["train", "evaluate", "logits", "prefill", "decode", "whole_window"]


def compile_source(
    source: ModelSource,
    *,
    micro_batch: int,
    length: int,
    precision: Precision,
    device: str = "cpu",
    products: Products | None = None,
    train: Sequence[str] = (),
    freeze: Sequence[str] = (),
    bfloat16: Collection[str] = (),
    sparse: Mapping[str, int] | None = None,
    goal: Goal = "train",
    with_buffers: bool = True,
    slot_bytes: int | None = None,
    known: Program | None = None,
) -> Program:
    """Compile a model for one micro-batch of sequences.

    The goal `evaluate` computes the loss without dropout and, for language models, the most likely
    label of each token. The goal `logits` computes the logits, and the goals `prefill`, `decode`
    and `whole_window` are the programs of incremental decoding (`compiler/decoding.py`). All but
    `train` run only the forward sweep, with every module in eval mode. `products` is the library of
    matrix products (None: the choice of a new run on this host). `bfloat16` are the weights that
    the store keeps as bfloat16, `sparse` the sparse weights with the most entries that each has.
    `known` is returned if its source graph equals the model's graph. Programs of
    presets and of Hugging Face configurations and folders are kept on disk between processes
    (`program_cache`).
    """
    target = target_of(device)
    inputs = source.input_specs(micro_batch, length)
    if goal not in ("train", "evaluate"):
        inputs = {name: spec for name, spec in inputs.items() if name not in source.targets}
    options = CompileOptions(
        precision=precision,
        device=target.trace_device,
        products=products or target.choose_products(Processor.here()),
        train=tuple(train),
        freeze=tuple(freeze),
        adapters=source.adapter_weights,
        bfloat16=frozenset(bfloat16),
        sparse=dict(sparse or {}),
        slot_bytes=slot_bytes,
        weight_prefix=source.weight_prefix,
        training=goal == "train",
        decoding=None if goal == "train" or goal == "evaluate" or goal == "logits" else goal,
    )

    def compile_now(module: nn.Module) -> Program:
        examples = source.example_inputs(micro_batch, length)
        return compile_module(
            module,
            {name: examples[name] for name in inputs},
            options,
            name=source.name,
            buffers=(lambda: _buffers(source)) if with_buffers else None,
            known=known,
        )

    request = Request(source, goal, inputs, options, with_buffers)
    return cached_program(request, lambda: _module_for(source, goal), known, compile_now)


@contextmanager
def _module_for(source: ModelSource, goal: Goal) -> Iterator[nn.Module]:
    """Give the module of a goal in the modes of its compilation, which end with the context."""
    if goal == "train":  # on fake tensors, parameters lose their owner's attributes
        refuse_gradient_hooks(source.original)
    modules = {"train": source.module, "evaluate": source.evaluation_module}
    module = modules.get(goal, source.logits_module)
    modes = [(child, child.training) for child in module.modules()]
    if goal != "train":  # training keeps the mode that each module's owner has set
        module.eval()
    try:
        yield module
    finally:
        for child, training in modes:
            child.training = training


def _buffers(source: ModelSource) -> dict[str, torch.Tensor]:
    """Return the real buffers under all their names."""
    real = source.buffers.values()
    known = {alias: real[name] for alias, name in source.aliases.items() if name in real}
    return {**known, **real}


def build_program(
    config: Config, *, micro_batch: int, sequence_length: int | None, precision: str
) -> Program:
    """Compile a model for inspection: no memory of a weight's size is allocated.

    **Arguments:** `sequence_length` None is that of the run (`shown_length`).
    """
    source = source_of(config, None, False, notice=lambda text: None)
    length = sequence_length or shown_length(config, source)
    sparse = sparse_weights_of(config, source)
    return compile_source(
        source,
        micro_batch=micro_batch,
        length=length,
        precision="bf16" if precision == "bf16" else "fp32",
        train=config.train,
        freeze=config.freeze,
        bfloat16=kept_as_bfloat16(config, source),
        sparse=sparse.capacities if sparse is not None else None,
        with_buffers=False,
    )


def make_engines(
    program: Program,
    plan: EnginePlan,
    shares: MemoryShares,
    engines: int,
    device: str,
    sparse: SparseWeights | None = None,
) -> list[Engine]:
    """Return this many engines of this process, each with its own budget.

    They share what is derived from the masks of `sparse` weights.
    """
    target = target_of(device)
    return [
        target.make_engine(program, plan, budget_bytes=shares.engine, sparse=sparse)
        for _ in range(engines)
    ]
