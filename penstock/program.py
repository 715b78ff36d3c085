"""The program: the compiler's output, and the only data structure that all other parts share.

The compiler creates it, engines run it, the store lays out its weights, and the planner estimates
its cost. It is plain data plus a few compiled callables per kind of stage. `verify` checks every
rule of a program; tests call it on each program that they create.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from penstock.errors import ProgramError
from penstock.operator_cost import OperatorCost
from penstock.weight_formats import BFLOAT16, WeightFormat

Executable = Callable[..., tuple[Any, ...]]


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class WeightSpec:
    """One parameter of the model, as the store keeps it and the fabric streams it.

    `name` is the parameter's first name in the model's `state_dict`. A tied weight is one weight,
    and `aliases` contains its further names. `format` defines how the store keeps the weight and
    which part is sent to engines. A shard of a store keeps flat pieces of parameters; a piece
    begins at the parameter's element `begin`. In a program, weights are whole.

    A sparse weight keeps at most `capacity` entries; its mask takes at most `index_bytes` on the
    wire. Both are 0 for other weights.
    """

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    trainable: bool
    aliases: tuple[str, ...] = ()
    begin: int = 0
    capacity: int = 0
    index_bytes: int = 0

    @property
    def elements(self) -> int:
        """The elements of the parameter, of which a sparse weight keeps some."""
        return math.prod(self.shape)

    @property
    def is_sparse(self) -> bool:
        return self.format.is_sparse

    @property
    def entries(self) -> int:
        """The values that the store has room for: all elements, or the capacity of a mask."""
        return self.capacity if self.is_sparse else self.elements

    @property
    def stream_dtype(self) -> torch.dtype:
        return self.format.stream_dtype

    @property
    def value_bytes(self) -> int:
        """The most bytes of the values of one fetch."""
        return self.entries * self.stream_dtype.itemsize

    @property
    def stream_bytes(self) -> int:
        """The most bytes of one fetch: the values, and the mask of a sparse weight."""
        return self.value_bytes + self.index_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weight in the store, without the optimizer's state."""
        return self.entries * self.format.width + self.index_bytes


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

    `source` is the origin: the batch, the prelude (computed once per program from no weight and no
    input), the prelude per batch (from inputs only), or a stage.
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

    It is either the stage's own input number `input` (nothing is copied), or a tensor that the
    forward executable returns after its outputs. `bytes` is the memory cost: the whole storage of
    the value, or 0 if the value is a view of an input or of an earlier saved value. `view_of` is
    then the number of the input whose memory the value keeps alive, if it is a view of an input.
    """

    tensor: TensorSpec
    input: int | None = None
    bytes: int = 0
    view_of: int | None = None


@dataclass(frozen=True)
class SparseUse:
    """How a kind computes with a sparse weight.

    Memory and operations are counted for `capacity` entries. `product_tokens` are the numbers of
    tokens of its sparse products, ascending. `dense_readers` are the operators that have no sparse
    product: they read the weight expanded, with zeros where the mask keeps nothing. `flops` are
    the operations of its sparse products, forward and backward; a multiply-add counts as two.
    """

    capacity: int
    product_tokens: tuple[int, ...] = ()
    dense_readers: tuple[str, ...] = ()
    flops: int = 0

    @property
    def way(self) -> str:
        """The entry of the weight in the program's table."""
        if not self.dense_readers:
            return "sparse product"
        verb = "read" if len(self.dense_readers) > 1 else "reads"
        dense = f"masked dense, because {', '.join(self.dense_readers)} {verb} it"
        return f"sparse product; {dense}" if self.product_tokens else dense


@dataclass(frozen=True)
class Kind:
    """The compiled part that stages with the same graph and shapes share.

    All executables take and return flat tuples of tensors. With W weights, I inputs, O outputs, and
    `key` an int64 tensor [2] for dropout (always passed, last of the forward's arguments): a number
    derived from seed, step and micro-batch, and the stage's `first_dropout`:

    - `forward(*weights, *inputs, key) -> (*outputs, *saved tensors)`
    - `infer(*weights, *inputs, key) -> outputs`: the same without saving
    - `backward(*weights[i] for i in backward_weights, *all saved, *grads of differentiable outputs,
      key) -> (*grads of differentiable inputs, *grads of trainable weights)`
    - `recompute(*weights, *inputs, key, *grads of differentiable outputs) -> (*grads of
      differentiable inputs, *grads of trainable weights)`: backward without saved values, which
      repeats the forward; bit-identical to `backward`.
    - `turn`: like `recompute`, returning the outputs first; for the last stage, which runs forward
      and backward in one call.

    A gradient may be None where the loss does not depend on that input. `flops` count a
    multiply-add as two. A call's `transient` bytes are the peak of its allocations, including its
    results.

    `sparse` describes the sparse weights by their position. An executable takes for each the
    engine's object with values and mask, and returns as its gradient float32 [kept entries], or a
    dense float32 tensor where the store has asked for that. `costs` are those of the operators of
    each executable, by its name; a sparse weight has its capacity there.
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
    sparse: Mapping[int, SparseUse] = field(default_factory=dict, hash=False)
    graphs: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    costs: Mapping[str, tuple[OperatorCost, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def weight_bytes(self) -> int:
        return sum(w.bytes for w in self.weights)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the values kept per micro-batch, besides the stage's inputs."""
        return sum(s.bytes for s in self.saved)


@dataclass(frozen=True)
class Stage:
    """The unit of streaming: some weights, and a place in the flow of values.

    `first_dropout` is the number of the stage's first dropout in the whole model. A kind numbers
    its dropouts relative to it, so that masks do not depend on the division into stages.
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

    `constants` are computed once, without inputs; `prelude(*inputs in order of prelude_inputs) ->
    values named prelude_outputs` runs once per micro-batch, before the first stage, and depends on
    no weight. `results` are the values that the model returns: the scalar loss of a training
    program, the logits of an inference program. `graph_digest` distinguishes the captured graphs of
    two programs; it is empty if there was no captured graph. `whole_window_reason` says why a
    program of incremental decoding computes the whole window for each token; it is empty otherwise.
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
    whole_window_reason: str = ""

    def home(self, weight: str) -> int:
        """Return the index of the first stage that uses a weight: the weight's home stage in the
        store."""
        return next(s.index for s in self.stages if weight in s.weights)

    def stage_stream_bytes(self, stage: Stage) -> int:
        """Return the bytes of one forward fetch of a stage."""
        return sum(self.weights[name].stream_bytes for name in stage.weights)

    @property
    def micro_batch(self) -> int:
        """The rows of a micro-batch, the first dimension of every input; 0 without inputs."""
        inputs = (self.values[name].tensor for name in self.inputs if name in self.values)
        return min((spec.shape[0] for spec in inputs), default=0)

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
    def capacities(self) -> dict[str, int]:
        """The most entries of each sparse weight, by name."""
        return {name: w.capacity for name, w in self.weights.items() if w.is_sparse}

    @property
    def sparse_weights(self) -> dict[str, SparseUse]:
        """How the stages compute with each sparse weight, all stages that use it together."""
        found: dict[str, SparseUse] = {}
        for stage in self.stages:
            for position, use in stage.kind.sparse.items():
                name = stage.weights[position]
                found[name] = _together(found[name], use) if name in found else use
        return found

    @property
    def draws_dropout(self) -> bool:
        """Return whether any stage's result depends on its dropout key."""
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


def _together(one: SparseUse, other: SparseUse) -> SparseUse:
    return SparseUse(
        one.capacity,
        tuple(sorted({*one.product_tokens, *other.product_tokens})),
        tuple(dict.fromkeys((*one.dense_readers, *other.dense_readers))),
        one.flops + other.flops,
    )


class StagedWeights(Protocol):
    """Weights by name, and the stages that use them: a program, or the part of a program in one
    store."""

    @property
    def stages(self) -> Sequence[WeightsOfStage]: ...

    @property
    def weights(self) -> Mapping[str, WeightSpec]: ...


class WeightsOfStage(Protocol):
    """A stage, reduced to its weights."""

    @property
    def name(self) -> str: ...

    @property
    def weights(self) -> Sequence[str]: ...


def extra_gradient_bytes(elements: int, entries: int, itemsize: int) -> int:
    """Return the bytes of a sparse weight's dense gradient beyond those of its entries' gradient,
    while the dense gradient is computed.

    **Arguments:** `itemsize` is that of the streamed values.
    """
    rounded = elements * itemsize if itemsize < 4 else 0  # the product, before it is widened
    return 4 * (elements - entries) + rounded


def largest_stage(held: StagedWeights, size: Callable[[WeightSpec], int]) -> tuple[str, int]:
    """Return the name and the size of the stage whose weights are the largest.

    `size` returns the size of one weight: buffers differ in element width, alignment and content.
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
        _verify_sparse(where, stage, program.weights)
        _verify_saved(where, kind)


def _verify_sparse(where: str, stage: Stage, weights: Mapping[str, WeightSpec]) -> None:
    for position, name in enumerate(stage.weights):
        use, spec = stage.kind.sparse.get(position), weights[name]
        have = None if use is None else use.capacity
        wanted = spec.capacity if spec.is_sparse else None
        _require(
            have == wanted,
            f"{where}: its kind has {have} entries of {name!r} (None: a dense weight), the "
            f"weight's capacity is {wanted}",
        )
        _require(
            0 <= spec.capacity <= spec.elements,
            f"weight {name!r} has {spec.elements} elements and a capacity of {spec.capacity}",
        )


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
