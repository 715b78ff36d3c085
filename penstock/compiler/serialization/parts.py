"""The stages, weights and values of a program as JSON."""

from typing import Any, Literal, cast

from penstock.compiler.serialization import fields
from penstock.compiler.serialization.fields import MalformedError, NotSerializableError
from penstock.compiler.serialization.kinds import read_spec, write_spec
from penstock.program import Kind, Stage, ValueSpec, WeightSpec
from penstock.weight_formats import FORMATS

_SOURCES = ("input", "constant", "prelude", "stage")


def write_stage(stage: Stage, kind: int) -> list[Any]:
    """Return a stage as JSON; `kind` is the number of its kind."""
    names = list(stage.weights), list(stage.inputs), list(stage.outputs)
    return [stage.name, kind, *names, stage.first_dropout]


def read_stage(index: int, value: Any, kinds: list[Kind]) -> Stage:
    """Return the stage of its written form."""
    name, kind, weights, inputs, outputs, first_dropout = fields.items(value, 6)
    if fields.number(kind) >= len(kinds):
        raise MalformedError(f"a stage has kind {kind} of {len(kinds)}")
    return Stage(
        index=index,
        name=fields.text(name),
        kind=kinds[kind],
        weights=fields.texts(weights),
        inputs=fields.texts(inputs),
        outputs=fields.texts(outputs),
        first_dropout=fields.number(first_dropout),
    )


def write_weight(name: str, spec: WeightSpec) -> list[Any]:
    """Return a weight as JSON."""
    if spec.name != name or FORMATS.get(spec.format.name) is not spec.format:
        raise NotSerializableError(f"weight {name} is {spec}")
    return [
        name,
        list(spec.shape),
        spec.format.name,
        spec.trainable,
        list(spec.aliases),
        spec.begin,
        spec.capacity,
        spec.index_bytes,
    ]


def read_weight(value: Any) -> WeightSpec:
    """Return the weight of its written form."""
    name, shape, kept, trainable, aliases, begin, capacity, index = fields.items(value, 8)
    if fields.text(kept) not in FORMATS:
        raise MalformedError(f"expected the format of a weight, got {kept!r:.80}")
    return WeightSpec(
        name=fields.text(name),
        shape=fields.shape(shape),
        format=FORMATS[kept],
        trainable=fields.flag(trainable),
        aliases=fields.texts(aliases),
        begin=fields.number(begin),
        capacity=fields.number(capacity),
        index_bytes=fields.number(index),
    )


def write_value(name: str, spec: ValueSpec) -> list[Any]:
    """Return a value as JSON."""
    if spec.name != name:
        raise NotSerializableError(f"value {name} is {spec}")
    return [name, write_spec(spec.tensor), spec.source, spec.requires_grad]


def read_value(value: Any) -> ValueSpec:
    """Return the value of its written form."""
    name, tensor, source, requires_grad = fields.items(value, 4)
    if fields.text(source) not in _SOURCES:
        raise MalformedError(f"expected the source of a value, got {source!r:.80}")
    return ValueSpec(
        name=fields.text(name),
        tensor=read_spec(tensor),
        source=cast(Literal["input", "constant", "prelude", "stage"], source),
        requires_grad=fields.flag(requires_grad),
    )
