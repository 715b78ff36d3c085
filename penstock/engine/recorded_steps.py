"""An engine whose device records the computation of a step and then repeats it as a whole.

All steps of a run compute the same: each call of the engine, such as a stage's backward for all
micro-batches, launches the same kernels on the same addresses. Launching them one by one takes the
host longer than small kernels run. So one step is recorded, call by call, and in later steps a call
is one launch. The kernels are the same, and so are the results, to the bit.

Addresses are those of the recorded step: of inputs, which each step copies there; of weights, since
each step fills the same slots in turn; and of everything between calls, which is in memory that
the recorder owns. There a later call may overwrite what an earlier one left, as in the recorded
step. Gradients are sent to the host while the next call computes: they stay until the call after
that, which waits for their copy.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import fx

from penstock.collectives import PartialSum, TreeReduction
from penstock.compiler import calls_operand
from penstock.engine.interface import Batch, EnginePlan, PendingGradients
from penstock.engine.slots import Arrived, DeviceSlots
from penstock.engine.torch_engine import Call, Result, TorchEngine
from penstock.errors import CompileError
from penstock.program import Program

_SENDING = 1  # stages whose gradients may be on their way while another call computes


class Recorder(Protocol):
    """A device's way to record computation; its memory lasts from `start` to `drop`."""

    def start(self, step_bytes: int) -> bool:
        """Begin a recording; return False if the device lacks memory for such a step."""
        ...

    def record(self, act: Callable[[], Result]) -> tuple[Result, Callable[[], object]]:
        """Record and execute computation; return its result, and what repeats it."""
        ...

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor at the same address that does not keep the memory from reuse."""
        ...

    def drop(self) -> None:
        """Release the memory of what was recorded; none of it is repeated any more."""
        ...


@dataclass(frozen=True)
class _Signature:
    """What decides the kernels of a step: the micro-batches, whose gradients have their places in
    the tree, and the masks of sparse weights."""

    first: int
    count: int
    total: int
    masks: tuple[int, bool] | None


@dataclass(frozen=True)
class _RecordedCall:
    """What repeats a call, the addresses of its weights, and the sums of gradients it leaves."""

    call: Call
    repeat: Callable[[], object]
    weights: tuple[Any, ...]
    sums: list[PartialSum] | None


@dataclass
class _Recording:
    """A step: the values that every step provides anew, the losses, and the calls in order."""

    signature: _Signature
    values: list[dict[str, torch.Tensor]]
    scales: list[torch.Tensor]
    losses: list[torch.Tensor] = field(default_factory=list)
    calls: list[_RecordedCall] = field(default_factory=list)


class RecordingEngine(TorchEngine):
    """Computes a step as it is, records the next one, and repeats that from then on.

    A step is recorded again after another share of the micro-batches, after a change of masks, and
    after an evaluation, which gets the memory. Results are those of `TorchEngine`.

    Args:
        program: as for `TorchEngine`.
        plan: as for `TorchEngine`.
        device: as for `TorchEngine`.
        budget_bytes: as for `TorchEngine`.
        slots: of the device.
        recorder: of the device; None for a program that `can_be_recorded` refuses.
    """

    def __init__(
        self,
        program: Program,
        plan: EnginePlan,
        *,
        device: str,
        budget_bytes: int | None,
        slots: DeviceSlots,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(program, plan, device=device, budget_bytes=budget_bytes, slots=slots)
        self._device_slots, self._recorder = slots, recorder
        self._has_sparse = any(spec.is_sparse for spec in program.weights.values())
        self._calls_of_step = 2 * len(program.stages) - 1
        self._mode: Literal["computing", "recording", "repeating"] = "computing"
        self._done = 0  # calls of the present step
        self._signature: _Signature | None = None  # of the present step
        self._recording: _Recording | None = None
        self._kept: TreeReduction | None = None  # the last sums of the step that is recorded
        self._sent: deque[Arrived] = deque()  # which the device may still be copying
        self._lacks_room = False
        self._alike = 0  # steps in a row before the present one with its signature
        self._patience = 1  # so many are computed before one is recorded
        self._repeated = 0  # how often the recording was

    @property
    def is_repeating(self) -> bool:
        """Whether the present step repeats a recorded one."""
        return self._mode == "repeating"

    def begin(self, batch: Batch) -> None:
        """Accept the inputs of a step and compute the prelude; discard any earlier step."""
        was_whole, before = self._done == self._calls_of_step, self._signature
        if self._mode == "recording" and not was_whole:
            self.drop_recording()
        if self._signature is None:  # its first step
            self._drop_others()
        self._mode, self._done, self._kept = "computing", 0, None
        self._await_copies(0)
        super().begin(batch)
        signature = self._signature = _signature_of(batch)
        self._alike = self._alike + 1 if was_whole and before == signature else 0
        if self._recording is not None and self._recording.signature == signature:
            self._mode = "repeating"
            self._repeated += 1
            self._provide(self._recording)
            return
        self.drop_recording()
        if self._alike >= self._patience and self._can_record(signature):
            values = [dict(flow.values) for flow in self._flows]
            self._recording = _Recording(signature, values, self._scales)
            self._mode = "recording"

    def forward(self, stage: int) -> None:
        """Run a stage on all micro-batches; keep the values that backward needs."""
        _engines.setdefault(self._device, weakref.WeakSet()).add(self)
        _last[self._device] = weakref.ref(self)
        if self._mode == "repeating":
            self._repeat(Call("forward", stage))
        else:
            super().forward(stage)

    def turn(self, stage: int) -> PendingGradients:
        """Run the last stage forward and backward; return its weights' gradients."""
        if self._mode == "repeating":
            sums = self._repeat(Call("turn", stage))
            self._send_losses()
            return self._send(stage, sums)
        return super().turn(stage)

    def backward(self, stage: int) -> PendingGradients:
        """Run a stage backward on all micro-batches; return its weights' gradients."""
        if self._mode == "repeating":
            return self._send(stage, self._repeat(Call("backward", stage)))
        return super().backward(stage)

    def infer(self, stage: int) -> None:
        """Run a stage forward; keep nothing for a backward."""
        if stage == 0:
            self._mode = "computing"
            self.drop_recording()
            self._drop_others()
        super().infer(stage)

    def release(self) -> None:
        """Release the memory that is kept between steps; later steps are recorded again."""
        super().release()
        with suppress(RuntimeError):  # a GPU that has failed has no memory to release
            self.drop_recording()

    def drop_recording(self) -> None:
        """Forget the recorded step and release its memory; a later step is recorded again.

        After a recording that was of no use, twice as many steps must be alike before the next one.
        """
        if self._recording is not None:
            assert self._recorder is not None
            self._recording = self._kept = None
            self._recorder.drop()
            self._patience *= 1 if self._repeated else 2
            self._alike = self._repeated = 0

    def _drop_others(self) -> None:
        """Release the memory of what other engines of this process have recorded on the device."""
        for engine in list(_engines.get(self._device, ())):
            if engine is not self:
                engine.drop_recording()

    def _can_record(self, signature: _Signature) -> bool:
        """Return whether the device has memory for a recorded step besides what it holds.

        Engines that take turns on a device share its memory, so at most one of them records.
        """
        if self._recorder is None or self._lacks_room:
            return False
        last = _last.get(self._device)
        has_unknown_masks = self._has_sparse and signature.masks is None
        if has_unknown_masks or last is None or last() is not self:
            return False
        self._drop_others()  # that have trained in between
        held = sum(tensor.nbytes for tensor in self._slots.resident)
        self._lacks_room = not self._recorder.start(self.memory.peak_bytes - held)
        return not self._lacks_room

    def _provide(self, recording: _Recording) -> None:
        """Copy what this step provides to where the recorded calls read it."""
        for values, flow in zip(recording.values, self._flows, strict=True):
            for name, value in values.items():
                value.copy_(flow.values[name])
        for scale, given in zip(recording.scales, self._scales, strict=True):
            scale.copy_(given)
        self._losses = recording.losses

    def _compute(self, call: Call, weights: Sequence[Any], act: Callable[[], Result]) -> Result:
        if self._mode != "recording":
            result = act()
            self._done += 1
            return result
        assert self._recording is not None
        assert self._recorder is not None
        self._await_copies(_SENDING)
        try:
            result, repeat = self._recorder.record(act)
        except RuntimeError as error:
            self._lacks_room = True
            place = self.program.stages[call.stage].name
            raise CompileError(
                f"the {call.sweep} of stage {place} cannot be recorded as a CUDA graph: {error}. "
                "Set engine.cuda_graphs: false; training continues from the last saved step."
            ) from error
        sums = None
        if isinstance(result, TreeReduction):
            sums = [self._unowned(node) for node in result.nodes()]
            self._kept = result  # until the next call has been recorded
            self._recording.losses = self._losses
        self._recording.calls.append(_RecordedCall(call, repeat, _places(weights), sums))
        self._done += 1
        return result

    def _repeat(self, call: Call) -> list[PartialSum]:
        """Repeat a call on new weights; return the sums of gradients that it leaves, if any."""
        assert self._recording is not None
        recorded = self._recording.calls[self._done]
        self._await_copies(_SENDING)
        with self._slots.use(call.stage) as weights:
            if (recorded.call, recorded.weights) != (call, _places(weights)):
                raise RuntimeError(f"expected the weights of {recorded.call}, got others, {call}")
            recorded.repeat()
        self._done += 1
        return recorded.sums or []

    def _send(self, stage: int, nodes: list[PartialSum]) -> PendingGradients:
        if self._mode == "computing":
            return super()._send(stage, nodes)
        if self._mode == "recording":
            assert self._recording is not None
            nodes = self._recording.calls[-1].sums or []
        sent = self._device_slots.send_back(stage, nodes)
        self._sent.append(sent)
        return sent

    def _await_copies(self, remaining: int) -> None:
        """Let what is computed next run after the gradients of all calls but the last `remaining`
        have been copied."""
        while len(self._sent) > remaining:
            self._device_slots.compute_after(self._sent.popleft())

    def _unowned(self, node: PartialSum) -> PartialSum:
        assert self._recorder is not None
        tensors = (None if t is None else self._recorder.unowned(t) for t in node.tensors)
        return PartialSum(node.level, node.index, tuple(tensors))


_engines: dict[torch.device, weakref.WeakSet[RecordingEngine]] = {}
"""The engines of this process that have trained, by device."""

_last: dict[torch.device, weakref.ref[RecordingEngine]] = {}
"""The engine that has computed a forward sweep last, by device."""


def _signature_of(batch: Batch) -> _Signature:
    return _Signature(batch.first, len(batch.micro_batches), batch.total, batch.masks)


def _places(weights: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(w.data_ptr() if isinstance(w, torch.Tensor) else w.place for w in weights)


# Operators whose kernels neither wait for the host nor depend on values that the host knows.
_RECORDED_OPERATORS = {
    *("mm", "addmm", "bmm", "baddbmm", "sum", "mean", "amax", "amin", "var_mean", "cumsum"),
    *("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm"),
    *("_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward"),
    *("embedding", "embedding_dense_backward", "gather", "index_select"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
    *("_scaled_dot_product_efficient_attention",),
    *("_scaled_dot_product_efficient_attention_backward",),
    *("linear_cross_entropy", "linear_cross_entropy_predictions"),
    *("linear_cross_entropy_backward", "linear_cross_entropy_turn"),
    *("cat", "stack", "full", "zeros", "ones", "empty", "arange", "full_like", "zeros_like"),
    *("ones_like", "empty_like", "new_zeros", "new_full", "new_ones", "new_empty"),
    *("constant_pad_nd", "slice_backward", "select_backward", "tril", "triu", "repeat", "roll"),
    *("split", "split_with_sizes", "unbind", "chunk", "expand", "slice", "select", "unsqueeze"),
    *("view", "_unsafe_view", "reshape", "t", "transpose", "permute", "squeeze", "unfold"),
    *("as_strided", "alias", "detach", "clone", "contiguous", "_to_copy", "diagonal", "flip"),
    "scalar_tensor",
}


def can_be_recorded(program: Program, device: str) -> bool:
    """Return whether a program launches the same kernels in every step, whatever the values.

    It has no dropouts, only operators that are known for it, and nothing on another device than
    `device`, such as "cuda". Sparse weights are expanded there.
    """
    kinds = {stage.kind.digest: stage.kind for stage in program.stages}.values()
    if any(kind.draws_dropout for kind in kinds):
        return False
    return all(
        _is_recorded(node, torch.device(device))
        for kind in kinds
        for graph in kind.graphs.values()
        for node in graph.nodes
        if node.op not in ("placeholder", "output", "get_attr")
    )


def _is_recorded(node: fx.Node, device: torch.device) -> bool:
    if node.target is operator.getitem or calls_operand(node):
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    used = node.kwargs.get("device")
    if isinstance(used, torch.device) and used.type != device.type:
        return False
    owner, _, name = target._schema.name.partition("::")
    if owner not in ("aten", "prims", "penstock"):  # a user's own
        return False
    return name in _RECORDED_OPERATORS or torch.Tag.pointwise in target.tags
