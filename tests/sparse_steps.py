"""Steps of an engine with sparse weights, and the same model in plain PyTorch under masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sweeps import Rows, Step, sweep, weights_of
from tiny_models import LENGTH, Case
from torch import nn

from penstock.compiler import CompileOptions, compile_module
from penstock.engine import EnginePlan, SparseProducts, SparseWeights, TorchEngine
from penstock.models import ModelSource
from penstock.program import Program, verify
from penstock.sparsity import (
    Choice,
    DenseTiles,
    SparseKernel,
    SparseWeight,
    StreamedWeight,
    index_of_mask,
)

KERNELS = Choice(SparseKernel(16), SparseKernel(32, 24), SparseKernel(48))
TILES = Choice(*3 * [DenseTiles(20)])
ONE_TILE = Choice(*3 * [DenseTiles(4096)])
ROUNDING = 2e-6  # of float32 sums in another order, as a share of the greatest element

Masks = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Pruned:
    """A model under masks: its program, and the masked parameters in plain PyTorch."""

    program: Program
    module: nn.Module
    masks: Masks
    loss: Callable[[nn.Module, Rows], torch.Tensor]

    def weights(self, version: int = 0, dense_gradient: bool = False) -> dict[str, StreamedWeight]:
        """Return what a store would send."""
        found: dict[str, StreamedWeight] = {}
        for name, value in weights_of(self.module, self.program).items():
            spec = self.program.weights[name]
            if not spec.is_sparse:
                found[name] = value
                continue
            mask = self.masks[name]
            asks = dense_gradient and spec.trainable
            index = index_of_mask(mask.flatten().numpy())
            found[name] = SparseWeight(name, spec.shape, value[mask], index, version, asks)
        return found

    def products(self, choice: Choice = KERNELS) -> SparseWeights:
        """Return one choice for all products."""
        return measured(self.program, self.masks, choice)

    def step(
        self,
        micro_batches: Sequence[Rows],
        plan: EnginePlan | None = None,
        choice: Choice = KERNELS,
        **options: Any,
    ) -> Step:
        """Do one step of an engine."""
        plan = plan or EnginePlan()
        engine = TorchEngine(self.program, plan, sparse=self.products(choice))
        return sweep(engine, plan, self.weights(**options), micro_batches)

    def reference(self, micro_batches: Sequence[Rows]) -> tuple[list[float], dict[str, Any]]:
        """Return losses and gradients of every element, by autograd."""
        self.module.zero_grad()
        losses = []
        for rows in micro_batches:
            loss = self.loss(self.module, rows)
            if loss.requires_grad:
                loss.backward()
            losses.append(float(loss.detach()))
        return losses, {name: p.grad for name, p in self.module.named_parameters()}


def measured(program: Program, masks: Masks, choice: Choice) -> SparseWeights:
    """Return the layouts and choices of a run in which every measurement prefers `choice`."""
    products = SparseProducts(measure=lambda *_: choice)
    sparsities = {name: [1 - float(mask.float().mean())] for name, mask in masks.items()}
    products.measure(products.cases(program, sparsities))
    return SparseWeights(products)


def masks_of(
    shapes: Mapping[str, Sequence[int]], density: float = 0.3, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return random masks, each with an empty and a full row."""
    masks = {}
    for number, (name, shape) in enumerate(shapes.items()):
        mask = np.random.default_rng([seed, number]).random(shape) < density
        if len(shape) > 1:
            mask[0], mask[-1] = False, True
        masks[name] = torch.from_numpy(mask)
    return masks


def capacities(masks: Masks, room: float = 1.2) -> dict[str, int]:
    """Return room for more entries than the masks keep."""
    return {
        name: min(mask.numel(), math.ceil(int(mask.sum()) * room)) for name, mask in masks.items()
    }


def prune(module: nn.Module, masks: Masks) -> None:
    """Set the parameters to zero where their masks keep nothing."""
    parameters = dict(module.named_parameters())
    for name, mask in masks.items():
        parameters[name].data *= mask


def pruned(module: nn.Module, rows: Rows, masks: Masks, **options: Any) -> Pruned:
    """Compile a module that returns its loss, with these masks."""
    prune(module, masks)
    buffers = dict(module.named_buffers())
    settings = CompileOptions(sparse=capacities(masks), **options)
    program = compile_module(module, rows, settings, name="pruned", buffers=lambda: buffers)
    return Pruned(verify(program), module, masks, lambda model, rows: model(**rows))


def pruned_case(
    case: Case, choose: Callable[[str, nn.Parameter], bool], seed: int = 0, **options: Any
) -> Pruned:
    """Compile a language model with masks on the chosen parameters."""
    model, source = case.plain(seed), case.source(seed)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if choose(n, p)}
    masks = masks_of(shapes, seed=seed)
    prune(model, masks)
    settings = CompileOptions(
        sparse=capacities(masks), weight_prefix=source.weight_prefix, **options
    )
    program = compile_module(
        source.module,
        source.example_inputs(2, LENGTH),
        settings,
        name=case.name,
        buffers=lambda: buffers_of(source),
    )
    return Pruned(verify(program), model, masks, case.loss)


def buffers_of(source: ModelSource) -> dict[str, torch.Tensor]:
    """Return a model's buffers under all their names."""
    real = source.buffers.values()
    tied = {alias: real[name] for alias, name in source.aliases.items() if name in real}
    return {**tied, **real}


def micro_batches_of(case: Case, count: int = 4, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of two rows with memory apart."""
    rows = {name: torch.from_numpy(value) for name, value in case.arrays(seed).items()}
    return [
        {name: value[2 * i : 2 * i + 2].clone() for name, value in rows.items()}
        for i in range(count)
    ]


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare float32 results with sums in another order."""
    assert found.shape == expected.shape, what
    if expected.numel() == 0:
        return
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= ROUNDING * max(scale, 1e-3), what


def assert_is_reference(model: Pruned, step: Step, micro_batches: Sequence[Rows]) -> None:
    """Assert losses and gradients of one step: entries' gradients are those of the dense weights at
    the masks."""
    losses, gradients = model.reference(micro_batches)
    np.testing.assert_allclose(step.losses, losses, rtol=2e-6)
    assert step.gradients.keys() == {n for n, w in model.program.weights.items() if w.trainable}
    for name, gradient in step.gradients.items():
        assert gradient is not None
        assert gradient.dtype == torch.float32
        expected = gradients[name]
        if model.program.weights[name].is_sparse and gradient.dim() == 1:
            expected = expected[model.masks[name]]
        assert_close(gradient, expected, name)
