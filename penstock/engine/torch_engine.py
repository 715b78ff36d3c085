"""The engine that computes with PyTorch, on the CPU or on one GPU (`targets.py` creates it).

It runs each stage on all micro-batches before the next stage, so a stage's weights are loaded once
per sweep. Per its plan, it keeps the values that the backward needs or recomputes them. Gradients
are summed in the fixed tree. On the CPU the store's weights are read in place. On a GPU weights
arrive through pinned slots on one stream and gradients return on another (`slots.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from penstock.collectives import PartialSum, TreeReduction
from penstock.engine.flow import Flow, check_inputs, on_device, out_of_range
from penstock.engine.host_memory import begin_call
from penstock.engine.interface import Batch, EnginePlan, PendingGradients
from penstock.engine.memory import MemoryAccount
from penstock.engine.slots import InPlace, WeightSlots
from penstock.engine.sparse_operand import BaseSparseOperand
from penstock.engine.sparse_weights import (
    SparseWeights,
    beside_bytes,
    dense_gradient_bytes,
    require_sparse_weights,
)
from penstock.errors import CompileError, DataError
from penstock.program import Program, Stage
from penstock.sparsity import SparseWeight, StreamedWeight

Result = TypeVar("Result")


class Call(NamedTuple):
    """One stage in one sweep, for all micro-batches."""

    sweep: Literal["forward", "turn", "backward"]
    stage: int


class TorchEngine:
    """Runs a program's stages with PyTorch on `device` within `budget_bytes`.

    `slots` transfer weights and gradients; without slots, weights are read in place. `sparse` keeps
    what is derived from masks, for a program with sparse weights that the slots do not expand.
    """

    def __init__(
        self,
        program: Program,
        plan: EnginePlan,
        *,
        device: str = "cpu",
        budget_bytes: int | None = None,
        slots: WeightSlots | None = None,
        sparse: SparseWeights | None = None,
    ) -> None:
        self._slots = slots or InPlace()
        if not self._slots.expands_sparse:
            require_sparse_weights(program, sparse)
        self.program = program
        self._sparse = sparse
        self._layout_bytes: dict[str, int] = {}  # of sparse weights, by name
        self.memory = MemoryAccount(budget_bytes)
        self._plan = plan
        self._device = torch.device(device)
        self._last_use = program.last_use()
        self._flows: list[Flow] = []
        self._batch: Batch | None = None
        self._scales: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []
        self._read_losses: Callable[[], list[float]] | None = None  # of the turn
        self._sum_bytes = self._sent_bytes = 0  # gradients that are being summed or sent
        self._transient = 0  # allocations of the last call
        self._dense_bytes = 0  # dense gradients of the present stage's sparse weights

    @property
    def stages_ahead(self) -> int:
        """How many stages' weights may be loading while another stage computes."""
        return self._slots.ahead

    def begin(self, batch: Batch) -> None:
        """Accept the inputs of a step and compute the prelude; discard any earlier step."""
        self.memory.clear()
        self.memory.hold(self._slots.resident, "the slots of weights")
        self.memory.reserve(self._kept_layout_bytes(), "the masks of sparse weights")
        self._slots.reset()
        self._flows, self._losses, self._batch = [], [], batch
        self._read_losses = None
        self._sum_bytes = self._sent_bytes = 0
        self._scales = self._scales_of(batch)
        self._flows = self._new_flows(batch)
        self._run_prelude()

    def load(self, stage: int, weights: Sequence[StreamedWeight]) -> None:
        """Start copying a stage's weights to the device; the next call for this stage uses them."""
        self._slots.load(stage, weights)

    @torch.no_grad()
    def forward(self, stage: int) -> None:
        """Run a stage on all micro-batches; keep the values that backward needs."""
        place = self.program.stages[stage]
        with self._entered(place) as weights:
            self._compute(
                Call("forward", stage), weights, lambda: self._run_forward(place, weights)
            )

    @torch.no_grad()
    def turn(self, stage: int) -> PendingGradients:
        """Run the last stage forward and backward; return its weights' gradients."""
        place = self.program.stages[stage]
        with self._entered(place) as weights:
            total = self._compute(
                Call("turn", stage), weights, lambda: self._run_turn(place, weights)
            )
        self._send_losses()
        return self._finish(stage, total)

    @torch.no_grad()
    def backward(self, stage: int) -> PendingGradients:
        """Run a stage backward on all micro-batches; return its weights' gradients."""
        place = self.program.stages[stage]
        with self._entered(place) as weights:
            total = self._compute(
                Call("backward", stage), weights, lambda: self._run_backward(place, weights)
            )
        return self._finish(stage, total)

    @torch.no_grad()
    def infer(self, stage: int) -> None:
        """Run a stage forward; keep nothing for a backward."""
        place, kind = self.program.stages[stage], self.program.stages[stage].kind
        with self._entered(place) as weights:
            for flow in self._flows:
                inputs = flow.inputs(place, self.program.constants)
                self._peak(kind.forward_transient_bytes, place)
                outputs = kind.infer(*weights, *inputs, flow.key(place))
                flow.put(self.memory, dict(zip(place.outputs, outputs, strict=True)), place.name)
                flow.drop_read(self.memory, self.program, self._last_use, place)
        if stage == len(self.program.stages) - 1:
            self._losses = [
                flow.values[self.program.results[0]].reshape(-1)[:1].sum().float()
                for flow in self._flows
            ]

    def results(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the program's results per micro-batch, after `infer` of the last stage."""
        return [tuple(f.values[n] for n in self.program.results) for f in self._flows]

    def losses(self) -> list[float]:
        """Return the loss of each micro-batch, once the last stage has run."""
        if not self._losses:
            return []
        if self._read_losses is not None:
            return self._read_losses()
        return torch.stack(self._losses).tolist()  # one device synchronisation, not one per loss

    def is_finite(self, stage: int) -> bool:
        """Return, after `infer` of a stage, whether its outputs contain no NaN and no infinity."""
        return all(
            bool(torch.isfinite(flow.values[name]).all())
            for flow in self._flows
            for name in self.program.stages[stage].outputs
            if flow.values[name].is_floating_point()
        )

    def release(self) -> None:
        """Release the values of the last step."""
        self._flows, self._losses, self._batch = [], [], None
        self.memory.clear()

    def _compute(self, call: Call, weights: Sequence[Any], act: Callable[[], Result]) -> Result:
        """Execute a call; `weights` are all that it reads besides the engine's own values."""
        return act()

    def _new_flows(self, batch: Batch) -> list[Flow]:
        """Return the values of each micro-batch: its inputs, in memory of the device."""
        if batch.kept and len(batch.micro_batches) != 1:
            raise ValueError(
                f"kept inputs are those of one micro-batch, got {len(batch.micro_batches)}"
            )
        flows = []
        for offset, inputs in enumerate(batch.micro_batches):
            flow = Flow(batch.first + offset, batch.seed, batch.step)
            check_inputs(self.program, {**inputs, **batch.kept})
            flow.put(self.memory, {**self._on_device(inputs), **batch.kept}, "inputs")
            flows.append(flow)
        return flows

    def _on_device(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of the inputs that the program reads, copied."""
        read = [name for name in self.program.inputs if name in self.program.values]
        return {name: on_device(inputs[name], self._device) for name in read if name in inputs}

    def _scales_of(self, batch: Batch) -> list[torch.Tensor]:
        """Return the gradients of the last stage's outputs, the same for each micro-batch."""
        kind = self.program.stages[-1].kind
        return [
            torch.full(spec.shape, batch.loss_scale, dtype=spec.dtype, device=self._device)
            for spec, needs in zip(kind.outputs, kind.outputs_grad, strict=True)
            if needs
        ]

    @torch.no_grad()
    def _run_prelude(self) -> None:
        program = self.program
        for flow in self._flows:
            if program.prelude is not None:
                args = [
                    program.constants[n] if n in program.constants else flow.values[n]
                    for n in program.prelude_inputs
                ]
                try:
                    made = program.prelude(*args)
                except IndexError as error:
                    raise self._out_of_range(error, "the part before the first stage") from error
                flow.put(
                    self.memory, dict(zip(program.prelude_outputs, made, strict=True)), "prelude"
                )
            for name in list(flow.values):
                if name not in self._last_use:
                    self.memory.release([flow.values.pop(name)])

    def _run_forward(self, place: Stage, weights: Sequence[Any]) -> None:
        kind, recompute = place.kind, place.index in self._plan.recompute
        for flow in self._flows:
            inputs = flow.inputs(place, self.program.constants)
            self._peak(kind.forward_transient_bytes, place)
            run = kind.infer if recompute else kind.forward
            results = run(*weights, *inputs, flow.key(place))
            outputs = results[: len(kind.outputs)]
            if recompute:
                flow.keep(self.memory, place, inputs)
            elif kind.saved:
                made = iter(results[len(kind.outputs) :])
                saved = [inputs[s.input] if s.input is not None else next(made) for s in kind.saved]
                flow.keep(self.memory, place, saved)
            flow.put(self.memory, dict(zip(place.outputs, outputs, strict=True)), place.name)
            flow.drop_read(self.memory, self.program, self._last_use, place)

    def _run_turn(self, place: Stage, weights: Sequence[Any]) -> TreeReduction:
        total, kind = self._new_sum(), place.kind
        for flow in self._flows:
            inputs = flow.inputs(place, self.program.constants)
            self._peak(kind.turn_transient_bytes + self._dense_bytes, place)
            scales = [scale.clone() for scale in self._scales]  # a gradient may be one of them
            results = kind.turn(*weights, *inputs, flow.key(place), *scales)
            self._losses.append(results[0].detach().reshape(()).float())
            flow.drop_read(self.memory, self.program, self._last_use, place)
            self._distribute(flow, place, results[len(kind.outputs) :], total)
            del results  # the sum is complete; free its memory for the next micro-batch
        return total

    def _run_backward(self, place: Stage, weights: Sequence[Any]) -> TreeReduction:
        total, kind = self._new_sum(), place.kind
        recompute = place.index in self._plan.recompute
        for flow in self._flows:
            saved = flow.saved.pop(place.index, [])
            if not any(kind.outputs_grad):
                self.memory.release(saved)
                continue
            tangents = self._tangents(flow, place)
            if recompute:
                self._peak(kind.recompute_transient_bytes + self._dense_bytes, place)
                results = kind.recompute(*weights, *saved, flow.key(place), *tangents)
            else:
                self._peak(kind.backward_transient_bytes + self._dense_bytes, place)
                results = kind.backward(*weights, *saved, *tangents, flow.key(place))
            self.memory.release([*saved, *tangents])
            del saved, tangents
            self._distribute(flow, place, results, total)
            del results
        return total

    def _new_sum(self) -> TreeReduction:
        assert self._batch is not None
        return TreeReduction(self._batch.total)

    @contextmanager
    def _entered(self, place: Stage) -> Iterator[list[Any]]:
        """Provide a stage's weights as executables take them, and account for their memory."""
        with self._slots.use(place.index) as given:
            held = [w if isinstance(w, torch.Tensor) else w.values for w in given]
            sparse = [w for w in given if not isinstance(w, torch.Tensor)]
            beside = sum(map(beside_bytes, sparse))
            self.memory.hold(held, place.name)
            self.memory.reserve(beside, place.name)
            weights = [self._prepared(weight) for weight in given]
            self._dense_bytes = sum(map(dense_gradient_bytes, sparse))
            self._transient = 0
            try:
                yield weights
            except IndexError as error:
                raise self._out_of_range(error, f"stage {place.name}") from error
            except NotImplementedError as error:  # PyTorch has no kernel
                raise CompileError(
                    f"stage {place.name} cannot run on {self._device.type}: {error}. Compute that "
                    "operator in float32 (.float() on its arguments), or set precision: fp32."
                ) from error
            self._hold_layouts(weights, place)
            self.memory.give_back(beside)
            self.memory.release(held)

    def _out_of_range(self, error: IndexError, place: str) -> DataError:
        assert self._batch is not None
        return out_of_range(error, place, self._batch.micro_batches)

    def _prepared(self, weight: Any) -> Any:
        """Return a weight as executables take it."""
        if not isinstance(weight, SparseWeight):
            return weight
        assert self._sparse is not None
        return self._sparse.prepare(weight)

    def _peak(self, transient_bytes: int, place: Stage) -> None:
        """Record the allocations of a call."""
        self._transient = transient_bytes
        self.memory.peak(transient_bytes, place.name)
        self._begin_call(transient_bytes)

    def _begin_call(self, size_bytes: int) -> None:
        """Make room in the memory of the host for what is computed next."""
        if self._device.type == "cpu":
            begin_call(size_bytes)

    def _kept_layout_bytes(self) -> int:
        """Return the bytes that are derived from masks and kept between stages."""
        return sum(self._layout_bytes.values())

    def _hold_layouts(self, weights: Sequence[Any], place: Stage) -> None:
        """Account for what the products of a stage have derived from masks and kept."""
        grown = 0
        for weight in weights:
            if isinstance(weight, BaseSparseOperand):
                size = weight.kept_bytes
                grown += size - self._layout_bytes.get(weight.name, 0)
                self._layout_bytes[weight.name] = size
        if grown:
            self.memory.reserve(grown, place.name)
            self.memory.peak(self._transient, place.name)

    def _tangents(self, flow: Flow, place: Stage) -> list[torch.Tensor]:
        found = flow.take_gradients(place)
        specs = [
            spec
            for spec, needs in zip(place.kind.outputs, place.kind.outputs_grad, strict=True)
            if needs
        ]
        for number, spec in enumerate(specs):
            if found[number] is None:
                zeros = torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
                self.memory.hold([zeros], place.name)
                found[number] = zeros
        return [tangent for tangent in found if tangent is not None]

    def _distribute(
        self,
        flow: Flow,
        place: Stage,
        results: Sequence[torch.Tensor | None],
        total: TreeReduction,
    ) -> None:
        """Pass gradients of inputs to the stages that computed them, and those of weights to the
        sum."""
        kind = place.kind
        names = [n for n, g in zip(place.inputs, kind.inputs_grad, strict=True) if g]
        for name, gradient in zip(names, results[: len(names)], strict=True):
            if gradient is not None:
                flow.add_gradient(self.memory, name, gradient)
        if any(kind.trainable):
            self._add(total, PartialSum(0, flow.number, tuple(results[len(names) :])), place)

    def _add(self, total: TreeReduction, leaf: PartialSum, place: Stage) -> None:
        """Add a micro-batch's gradients to the sum, and account for the sum's memory."""
        wider = sum(4 * t.numel() for t in leaf.tensors if t is not None and t.itemsize < 4)
        wider = wider if self._sum_bytes else 0
        self.memory.peak(_bytes([leaf]) + wider, place.name)
        self._begin_call(wider)
        total.add(leaf)
        self.memory.give_back(self._sum_bytes)
        self._sum_bytes = _bytes(total.nodes())
        self.memory.reserve(self._sum_bytes, place.name)

    def _finish(self, stage: int, total: TreeReduction) -> PendingGradients:
        """Start sending a stage's sums; the previous stage's sums have been taken by now."""
        self.memory.give_back(self._sent_bytes)
        self._sent_bytes, self._sum_bytes = self._sum_bytes, 0
        return self._send(stage, total.nodes())

    def _send_losses(self) -> None:
        """Start sending the losses, so that reading them waits for the turn alone."""
        if self._losses:
            self._read_losses = self._slots.send_losses(self._losses)

    def _send(self, stage: int, nodes: list[PartialSum]) -> PendingGradients:
        return self._slots.send_back(stage, nodes)


def _bytes(nodes: Sequence[PartialSum]) -> int:
    return sum(t.nbytes for node in nodes for t in node.tensors if t is not None)
