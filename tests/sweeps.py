"""One step of an engine, driven by hand: no store, no trainer, any weights and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock.collectives.tree_reduce import PartialSum, TreeReduction
from penstock.compiler import CompileOptions, compile_module
from penstock.engine import Batch, Engine, EnginePlan, TorchEngine
from penstock.engine.threads import set_threads
from penstock.program import Program, Stage, verify

set_threads(1)  # for tensors this small a second thread is only waited for

Rows = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """What a step gave: the micro-batches' losses, gradients by weight, and by stage their sums."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    nodes: dict[int, list[PartialSum]]


def compiled(module: nn.Module, rows: Rows, **options) -> Program:
    """Compile a real module for micro-batches like `rows`, and check every rule."""
    buffers = dict(module.named_buffers())
    program = compile_module(
        module, rows, CompileOptions(**options), name="tested", buffers=lambda: buffers
    )
    return verify(program)


def weights_of(module: nn.Module, program: Program) -> dict[str, torch.Tensor]:
    """Return the module's parameters as the program streams them."""
    return {
        name: parameter.detach().to(program.weights[name].stream_dtype)
        for name, parameter in module.named_parameters()
        if name in program.weights
    }


def sweep(
    engine: Engine,
    plan: EnginePlan,
    weights: Mapping[str, torch.Tensor],
    micro_batches: Sequence[Rows],
    *,
    first: int = 0,
    total: int | None = None,
    seed: int = 0,
    step: int = 0,
    scale: float = 1.0,
) -> Step:
    """Do one step; where only a part of the step's micro-batches is given, sums stay partial."""
    program, last = engine.program, engine.program.stages[-1]
    count = total or len(micro_batches)
    engine.begin(Batch(micro_batches, first, count, seed, step, scale))
    for stage in program.stages:
        engine.load(stage.index, [weights[name] for name in stage.weights])
        if stage is not last:
            engine.forward(stage.index)
    pending = {last.index: engine.turn(last.index)}
    losses = engine.losses()
    for stage in reversed(program.stages[:-1]):
        positions = read_backward(stage, plan)
        engine.load(stage.index, [weights[stage.weights[i]] for i in positions])
        pending[stage.index] = engine.backward(stage.index)
    nodes = {index: part.wait() for index, part in pending.items()}
    return Step(losses, gradients_by_weight(program, nodes, count), nodes)


def sweep_and_let_go(
    engine: Engine,
    plan: EnginePlan,
    weights: Mapping[str, torch.Tensor],
    micro_batches: Sequence[Rows],
) -> None:
    """Do one step as the trainer does it: a stage's gradients leave while the next computes."""
    program, last = engine.program, engine.program.stages[-1]
    engine.begin(Batch(micro_batches, 0, len(micro_batches), 0, 0))
    for stage in program.stages:
        engine.load(stage.index, [weights[name] for name in stage.weights])
        if stage is not last:
            engine.forward(stage.index)
    waiting = engine.turn(last.index)
    for stage in reversed(program.stages[:-1]):
        positions = read_backward(stage, plan)
        engine.load(stage.index, [weights[stage.weights[i]] for i in positions])
        pending = engine.backward(stage.index)
        waiting.wait()
        waiting = pending
    waiting.wait()


def read_backward(stage: Stage, plan: EnginePlan) -> tuple[int, ...]:
    """Return the weights that a stage's backward reads: all, where it makes the forward again."""
    everything = tuple(range(len(stage.weights)))
    return everything if stage.index in plan.recompute else stage.kind.backward_weights


def gradients_by_weight(
    program: Program, nodes: Mapping[int, Sequence[PartialSum]], count: int
) -> dict[str, torch.Tensor | None]:
    """Finish the sums of all stages; a tied weight's parts are added, the head's first."""
    found: dict[str, torch.Tensor | None] = {}
    for stage in reversed(program.stages):
        trained = [name for name in stage.weights if program.weights[name].trainable]
        total = TreeReduction(count)
        for node in nodes.get(stage.index, ()):
            total.add(node)
        sums = total.nodes()
        if len(sums) != 1 or (1 << sums[0].level) < count:
            continue
        for name, gradient in zip(trained, total.root(), strict=True):
            have = found.get(name)
            found[name] = (
                have if gradient is None else gradient if have is None else have + gradient
            )
    return found


def one_step(
    module: nn.Module, micro_batches: Sequence[Rows], plan: EnginePlan | None = None, **options
) -> Step:
    """Compile a module and do one step of it."""
    program = compiled(module, micro_batches[0], **options)
    plan = plan or EnginePlan()
    engine = TorchEngine(program, plan)
    return sweep(engine, plan, weights_of(module, program), micro_batches)
