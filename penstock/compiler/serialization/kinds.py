"""The kinds of a program as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from penstock.compiler.serialization import fields
from penstock.compiler.serialization.fields import MalformedError, NotSerializableError
from penstock.compiler.weight_products import WEIGHT_FORMS
from penstock.errors import ProgramError
from penstock.operator_cost import OperatorCost
from penstock.program import Kind, Program, SavedTensor, SparseUse, TensorSpec

if TYPE_CHECKING:
    from torch import fx

    from penstock.compiler.serialization.graphs import GraphReader, GraphWriter

_EXECUTABLES = ("forward", "infer", "backward", "recompute", "turn")
_NUMBERS = (
    "forward_flops",
    "backward_flops",
    "forward_transient_bytes",
    "backward_transient_bytes",
    "recompute_transient_bytes",
    "turn_transient_bytes",
)
_KEYS = (
    "name",
    "digest",
    "weights",
    "trainable",
    "inputs",
    "inputs_grad",
    "outputs",
    "outputs_grad",
    "saved",
    "backward_weights",
    "draws_dropout",
    *_NUMBERS,
    "sparse",
    "graphs",
    "costs",
)


def write_spec(spec: TensorSpec) -> list[Any]:
    """Return the shape and type of a tensor as JSON."""
    name = str(spec.dtype).removeprefix("torch.")
    if name not in fields.DTYPES or not all(type(size) is int for size in spec.shape):
        raise NotSerializableError(f"a tensor is {spec}")
    return [list(spec.shape), name]


def read_spec(value: Any) -> TensorSpec:
    """Return the shape and type of a tensor."""
    shape, dtype = fields.items(value, 2)
    return TensorSpec(fields.shape(shape), fields.dtype(dtype))


def distinct_kinds(program: Program) -> tuple[list[Kind], list[int]]:
    """Return the kinds of a program, each once, and for each stage the number of its kind."""
    numbers: dict[int, int] = {}
    kinds: list[Kind] = []
    for stage in program.stages:
        if id(stage.kind) not in numbers:
            numbers[id(stage.kind)] = len(kinds)
            kinds.append(stage.kind)
    return kinds, [numbers[id(stage.kind)] for stage in program.stages]


def not_executable(*arguments: Any) -> NoReturn:
    """Stand for an executable of an outline.

    Raises:
        ProgramError: always.
    """
    raise ProgramError("the outline of a program has no executables")


def write_kind(kind: Kind, graphs: GraphWriter | None) -> dict[str, Any]:
    """Return a kind as JSON, without its graphs if there is nothing to write them.

    Raises:
        NotSerializableError: an executable is more than its graph.
    """
    if tuple(kind.graphs) != _EXECUTABLES or tuple(kind.costs) != _EXECUTABLES:
        raise NotSerializableError(f"kind {kind.name} has the graphs {list(kind.graphs)}")
    return {
        "name": kind.name,
        "digest": kind.digest,
        "weights": [write_spec(spec) for spec in kind.weights],
        "trainable": list(kind.trainable),
        "inputs": [write_spec(spec) for spec in kind.inputs],
        "inputs_grad": list(kind.inputs_grad),
        "outputs": [write_spec(spec) for spec in kind.outputs],
        "outputs_grad": list(kind.outputs_grad),
        "saved": [[write_spec(s.tensor), s.input, s.bytes, s.view_of] for s in kind.saved],
        "backward_weights": list(kind.backward_weights),
        "draws_dropout": kind.draws_dropout,
        **{name: getattr(kind, name) for name in _NUMBERS},
        "sparse": [
            [place, use.capacity, list(use.product_tokens), list(use.dense_readers), use.flops]
            for place, use in kind.sparse.items()
        ],
        "graphs": None
        if graphs is None
        else [graphs.executable(getattr(kind, n), kind.graphs[n]) for n in _EXECUTABLES],
        "costs": [[_write_cost(cost) for cost in kind.costs[n]] for n in _EXECUTABLES],
    }


def read_kind(value: Any, graphs: GraphReader | None) -> Kind:
    """Return the kind of its written form, without executables if there is nothing to read them.

    Raises:
        MalformedError: it is not the written form of a kind.
    """
    have = fields.mapping(value, _KEYS)
    name = fields.text(have["name"])
    modules: dict[str, Any] = dict.fromkeys(_EXECUTABLES, not_executable)
    if graphs is not None:
        lines = fields.items(have["graphs"], len(_EXECUTABLES))
        for executable, each in zip(_EXECUTABLES, lines, strict=True):
            modules[executable] = graphs.executable(each, f"{executable}_{name}")
    costs = fields.items(have["costs"], len(_EXECUTABLES))
    rest: dict[str, Any] = {**modules, **{key: fields.number(have[key]) for key in _NUMBERS}}
    kind = Kind(
        name=name,
        digest=fields.text(have["digest"]),
        weights=tuple(map(read_spec, fields.items(have["weights"]))),
        trainable=fields.flags(have["trainable"]),
        inputs=tuple(map(read_spec, fields.items(have["inputs"]))),
        inputs_grad=fields.flags(have["inputs_grad"]),
        outputs=tuple(map(read_spec, fields.items(have["outputs"]))),
        outputs_grad=fields.flags(have["outputs_grad"]),
        saved=tuple(map(_read_saved, fields.items(have["saved"]))),
        backward_weights=fields.numbers(have["backward_weights"]),
        draws_dropout=fields.flag(have["draws_dropout"]),
        sparse=dict(map(_read_sparse, fields.items(have["sparse"]))),
        graphs={} if graphs is None else {name: each.graph for name, each in modules.items()},
        costs={
            executable: tuple(map(_read_cost, fields.items(lines)))
            for executable, lines in zip(_EXECUTABLES, costs, strict=True)
        },
        **rest,
    )
    if graphs is not None:
        _require_arity(kind)
    return kind


def _require_arity(kind: Kind) -> None:
    """Raise unless every executable takes and returns as many values as its kind says."""
    if len(kind.trainable) != len(kind.weights) or len(kind.inputs_grad) != len(kind.inputs):
        raise MalformedError(f"kind {kind.name} does not say what it trains")
    if len(kind.outputs_grad) != len(kind.outputs):
        raise MalformedError(f"kind {kind.name} does not say which outputs have gradients")
    given, tangents = len(kind.weights) + len(kind.inputs) + 1, sum(kind.outputs_grad)
    outputs, gradients = len(kind.outputs), sum(kind.trainable) + sum(kind.inputs_grad)
    returned = sum(1 for saved in kind.saved if saved.input is None)
    backward = len(kind.backward_weights) + len(kind.saved) + tangents + 1
    wanted = {
        "forward": (given, outputs + returned),
        "infer": (given, outputs),
        "backward": (backward, gradients),
        "recompute": (given + tangents, gradients),
        "turn": (given + tangents, outputs + gradients),
    }
    for name, counts in wanted.items():
        if (found := arity(kind.graphs[name])) != counts:
            raise MalformedError(f"{name} of kind {kind.name} has {found} values, not {counts}")


def arity(graph: fx.Graph) -> tuple[int, int]:
    """Return how many values an executable takes and returns."""
    *_, output = graph.nodes
    returned = output.args[0]
    if not isinstance(returned, (list, tuple)):
        raise MalformedError("a graph does not return a tuple")
    return len(graph.find_nodes(op="placeholder")), len(returned)


def _read_saved(value: Any) -> SavedTensor:
    tensor, place, size, view_of = fields.items(value, 4)
    return SavedTensor(
        read_spec(tensor),
        input=None if place is None else fields.number(place),
        bytes=fields.number(size),
        view_of=None if view_of is None else fields.number(view_of),
    )


def _read_sparse(value: Any) -> tuple[int, SparseUse]:
    place, capacity, tokens, readers, flops = fields.items(value, 5)
    use = SparseUse(
        fields.number(capacity), fields.numbers(tokens), fields.texts(readers), fields.number(flops)
    )
    return fields.number(place), use


def _write_cost(cost: OperatorCost) -> list[Any]:
    return [
        cost.name,
        cost.work,
        cost.dtype,
        cost.layout,
        float(cost.size),
        cost.flops,
        cost.bytes,
        cost.calls,
        cost.form,
        cost.outputs,
        cost.inputs,
    ]


def _read_cost(value: Any) -> OperatorCost:
    name, work, dtype, layout, size, flops, moved, calls, *weight = fields.items(value, 11)
    form, outputs, inputs = weight
    return OperatorCost(
        name=fields.text(name),
        work=fields.text(work),
        dtype=fields.text(dtype),
        layout=fields.text(layout),
        size=fields.decimal(size),
        flops=fields.number(flops),
        bytes=fields.number(moved),
        calls=fields.number(calls),
        form=_form(form),
        outputs=fields.number(outputs),
        inputs=fields.number(inputs),
    )


def _form(value: Any) -> str:
    """Return which product with a weight an operator is; empty if it is none."""
    form = fields.text(value)
    if form and form not in WEIGHT_FORMS:
        raise MalformedError(f"expected a product with a weight, got {form!r:.80}")
    return form
