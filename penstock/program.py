"""The program: what the compiler makes of a model, and the only thing every other part agrees on.

The compiler makes it, engines run it, the store lays out its weights, the planner costs it. It is
plain data plus, per kind of stage, a few compiled callables. `verify` checks every rule that a
program must obey; tests call it on each program they make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from penstock.errors import ProgramError
from penstock.weight_formats import BFLOAT16, WeightFormat

Executable = Callable[..., tuple[Any, ...]]


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class WeightSpec:
    """One parameter of the model, as the store keeps it and the fabric streams it.

    `name` is the parameter's first name in the model's `state_dict`; a tied weight is one weight
    and `aliases` holds its further names. `format` says how the store keeps it and what of it
    travels to engines. What a shard of a store keeps is a flat piece of a parameter, which begins
    at its element `begin`; in a program weights are whole.
    """

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    trainable: bool
    aliases: tuple[str, ...] = ()
    begin: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stream_dtype(self) -> torch.dtype:
        return self.format.stream_dtype

    @property
    def stream_bytes(self) -> int:
        return nbytes(self.shape, self.stream_dtype)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weight in the store, without the optimizer's state."""
        return self.elements * self.format.width


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor of one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return nbytes(self.shape, self.dtype)


@dataclass(frozen=True)
class ValueSpec:
    """A named value of one micro-batch that stages read or write.

    `source` says where it comes from: the batch, the prelude (computed once per program from no
    weight and no input), the prelude per batch (from inputs only), or a stage.
    """

    name: str
    tensor: TensorSpec
    source: Literal["input", "constant", "prelude", "stage"]
    requires_grad: bool

    @property
    def bytes(self) -> int:
        return self.tensor.bytes


@dataclass(frozen=True)
class SavedTensor:
    """One value that a stage's forward keeps for its backward.

    Either the stage's own input number `input` (nothing is copied), or a tensor that the forward
    executable returns after its outputs. `bytes` is what keeping it costs: its whole storage, or
    0 where that is an input's or an earlier saved value's (a view of it); `view_of` is then the
    number of the input whose memory it keeps alive, if it is an input's.
    """

    tensor: TensorSpec
    input: int | None = None
    bytes: int = 0
    view_of: int | None = None


@dataclass(frozen=True)
class Kind:
    """What stages with the same graph and shapes share; compiled once.

    All executables take and return flat tuples of tensors. With W weights, I inputs, O outputs,
    and `key` an int64 tensor [2] for dropout (always passed, last of the forward's arguments):
    what seed, step and micro-batch make, and the stage's `first_dropout`:

    - `forward(*weights, *inputs, key) -> (*outputs, *saved tensors)`
    - `infer(*weights, *inputs, key) -> outputs`: the same without saving
    - `backward(*weights[i] for i in backward_weights, *all saved, *grads of differentiable
      outputs, key) -> (*grads of differentiable inputs, *grads of trainable weights)`
    - `recompute(*weights, *inputs, key, *grads of differentiable outputs) -> (*grads of
      differentiable inputs, *grads of trainable weights)`: backward with nothing saved, the
      forward made again; the same bits as `backward`.
    - `turn`: like `recompute`, returning the outputs first; for the last stage, where forward and
      backward are one.

    A gradient may be None where the loss does not depend on that input. `flops` count a
    multiply-add as two. A call's `transient` bytes are the peak of
    what it allocates, what it returns included.
    """

    name: str
    digest: str
    weights: tuple[TensorSpec, ...]
    trainable: tuple[bool, ...]
    inputs: tuple[TensorSpec, ...]
    inputs_grad: tuple[bool, ...]
    outputs: tuple[TensorSpec, ...]
    outputs_grad: tuple[bool, ...]
    saved: tuple[SavedTensor, ...]
    backward_weights: tuple[int, ...]
    forward: Executable
    infer: Executable
    backward: Executable
    recompute: Executable
    turn: Executable
    draws_dropout: bool
    forward_flops: int
    backward_flops: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    recompute_transient_bytes: int
    turn_transient_bytes: int
    graphs: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def weight_bytes(self) -> int:
        return sum(w.bytes for w in self.weights)

    @property
    def saved_bytes(self) -> int:
        """Bytes that keeping costs per micro-batch beyond the stage's inputs."""
        return sum(s.bytes for s in self.saved)


@dataclass(frozen=True)
class Stage:
    """The unit that is streamed: some weights, and a place in the flow of values.

    `first_dropout` is the number of its first dropout among those of the whole model. A kind knows
    its dropouts by their distance from that, so that masks do not depend on where stages end.
    """

    index: int
    name: str
    kind: Kind
    weights: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    first_dropout: int = 0


@dataclass(frozen=True)
class Program:
    """A model compiled for one micro-batch shape and one precision.

    `constants` are computed once, from nothing; `prelude(*inputs in order of prelude_inputs) ->
    values named prelude_outputs` runs once per micro-batch, before the first stage, and depends
    on no weight. `results` are the values that the model returns: the scalar loss of a training
    program, the logits of an inference program. `graph_digest` tells the captured graphs of two
    programs apart; it is empty where there was none.
    """

    name: str
    stages: tuple[Stage, ...]
    weights: Mapping[str, WeightSpec]
    values: Mapping[str, ValueSpec]
    inputs: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    prelude: Executable | None
    prelude_inputs: tuple[str, ...]
    prelude_outputs: tuple[str, ...]
    results: tuple[str, ...]
    graph_digest: str = ""

    def home(self, weight: str) -> int:
        """Return the index of the first stage that uses a weight: where the store keeps it."""
        return next(s.index for s in self.stages if weight in s.weights)

    def stage_stream_bytes(self, stage: Stage) -> int:
        """Return the bytes that one forward fetch of a stage moves."""
        return sum(self.weights[name].stream_bytes for name in stage.weights)

    @property
    def parameters(self) -> int:
        return sum(w.elements for w in self.weights.values())

    @property
    def trainable_parameters(self) -> int:
        return sum(w.elements for w in self.weights.values() if w.trainable)

    @property
    def bfloat16(self) -> frozenset[str]:
        """Names of the frozen weights that the store keeps as bfloat16."""
        return frozenset(name for name, w in self.weights.items() if w.format is BFLOAT16)

    @property
    def draws_dropout(self) -> bool:
        """Tell whether any stage's result depends on its dropout key."""
        return any(stage.kind.draws_dropout for stage in self.stages)

    def last_use(self) -> dict[str, int]:
        """Return, per value, the index of the last stage that reads it in the forward sweep."""
        last: dict[str, int] = {}
        for stage in self.stages:
            for name in (*stage.inputs, *stage.outputs):
                last[name] = stage.index
        for name in self.results:
            last[name] = len(self.stages)
        return last


class StagedWeights(Protocol):
    """Weights by name, and the stages that use them: a program, or what a store holds of one."""

    @property
    def stages(self) -> Sequence[WeightsOfStage]: ...

    @property
    def weights(self) -> Mapping[str, WeightSpec]: ...


class WeightsOfStage(Protocol):
    """A stage, as far as its weights go."""

    @property
    def name(self) -> str: ...

    @property
    def weights(self) -> Sequence[str]: ...


def largest_stage(held: StagedWeights, size: Callable[[WeightSpec], int]) -> tuple[str, int]:
    """Return the stage whose weights take the most, by name, and how much that is.

    `size` says what one weight takes: buffers differ in width, alignment and in what they hold.
    """
    taken = [
        (stage.name, sum(size(held.weights[n]) for n in stage.weights)) for stage in held.stages
    ]
    return max(taken, key=lambda stage: stage[1])


def verify(program: Program) -> Program:
    """Check every rule of the representation and return the program; raise `ProgramError`."""
    _verify_stages(program)
    known = {n for n, v in program.values.items() if v.source in ("input", "constant", "prelude")}
    produced: set[str] = set()
    for stage in program.stages:
        for name in stage.inputs:
            _require(
                name in known or name in produced,
                f"stage {stage.name} reads {name!r} before any stage has written it",
            )
        for name in stage.outputs:
            _require(name not in produced, f"{name!r} is written twice, again by {stage.name}")
            produced.add(name)
    for name in program.results:
        _require(name in produced, f"result {name!r} is written by no stage")
    for name in (*program.constants, *program.prelude_outputs, *program.inputs):
        _require(name in program.values, f"{name!r} has no value specification")
    used = {name for stage in program.stages for name in stage.weights}
    for name, spec in program.weights.items():
        _require(name in used, f"weight {name!r} is used by no stage")
        _require(
            spec.format.is_trainable or not spec.trainable,
            f"weight {name!r} is trained, and its format {spec.format.name} takes no updates",
        )
    return program


def _verify_stages(program: Program) -> None:
    by_digest: dict[str, Kind] = {}
    for position, stage in enumerate(program.stages):
        kind, where = stage.kind, f"stage {stage.name}"
        _require(stage.index == position, f"{where} has index {stage.index}, stands at {position}")
        _require(
            by_digest.setdefault(kind.digest, kind) is kind,
            f"{where}: two kinds carry the digest {kind.digest}",
        )
        for label, names, specs in (
            ("weight", stage.weights, kind.weights),
            ("input", stage.inputs, kind.inputs),
            ("output", stage.outputs, kind.outputs),
        ):
            _require(
                len(names) == len(specs),
                f"{where} binds {len(names)} {label}s, its kind has {len(specs)}",
            )
            table = program.weights if label == "weight" else program.values
            for name, spec in zip(names, specs, strict=True):
                _require(name in table, f"{where}: unknown {label} {name!r}")
                have = table[name]
                tensor = (
                    TensorSpec(have.shape, have.stream_dtype)
                    if isinstance(have, WeightSpec)
                    else have.tensor
                )
                _require(tensor == spec, f"{where}: {label} {name!r} is {tensor}, kind has {spec}")
        for name, trainable in zip(stage.weights, kind.trainable, strict=True):
            _require(
                program.weights[name].trainable == trainable,
                f"{where}: {name!r} is trainable in one place and frozen in another",
            )
        _verify_saved(where, kind)


def _verify_saved(where: str, kind: Kind) -> None:
    for number, saved in enumerate(kind.saved):
        if saved.input is not None:
            _require(saved.input < len(kind.inputs), f"{where}: saves input {saved.input}")
            _require(
                saved.tensor == kind.inputs[saved.input],
                f"{where}: saved value {number} differs from the input that it names",
            )
    for position in kind.backward_weights:
        _require(position < len(kind.weights), f"{where}: backward reads weight {position}")
    _require(kind.saved_bytes >= 0, f"{where}: negative saved bytes")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramError(message)
