"""A program as bytes: the length of a JSON text, the text, and the values of constants."""

from __future__ import annotations

import json
from typing import Any, Literal, cast

from penstock.compiler.serialization import fields
from penstock.compiler.serialization.constants import read_constants, write_constants
from penstock.compiler.serialization.fields import MalformedError
from penstock.compiler.serialization.graphs import GraphReader, GraphWriter
from penstock.compiler.serialization.kinds import (
    arity,
    read_kind,
    read_spec,
    write_kind,
    write_spec,
)
from penstock.compiler.serialization.targets import NotSerializableError
from penstock.errors import ProgramError
from penstock.program import Kind, Program, Stage, ValueSpec, WeightSpec, verify
from penstock.weight_formats import FORMATS

_LENGTH_BYTES = 8
_SOURCES = ("input", "constant", "prelude", "stage")
_KEYS = (
    "name",
    "stages",
    "weights",
    "values",
    "inputs",
    "constants",
    "prelude",
    "prelude_inputs",
    "prelude_outputs",
    "results",
    "graph_digest",
    "kinds",
    "tables",
)


def serialize(program: Program) -> bytes:
    """Return the written form of a program.

    Raises:
        NotSerializableError: the program contains something that has no written form.
    """
    data = _written(program)
    try:
        again = _written(deserialize(data))
    except MalformedError as error:
        raise NotSerializableError(f"the written form cannot be read: {error}") from error
    if again != data:
        raise NotSerializableError("the written form reads as another program")
    return data


def deserialize(data: bytes | memoryview) -> Program:
    """Return the program of its written form.

    Raises:
        MalformedError: the bytes are not the written form of a program.
    """
    view = memoryview(data)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if end > len(view):
        raise MalformedError(f"expected {end} bytes, got {len(view)}")
    try:
        content = json.loads(bytes(view[_LENGTH_BYTES:end]))
        return verify(_program(fields.mapping(content, _KEYS), view[end:]))
    except MalformedError:
        raise
    except (ValueError, TypeError, OverflowError, RuntimeError, ProgramError) as error:
        # Of JSON (also of its depth), of PyTorch for impossible shapes, and of `verify`.
        raise MalformedError(f"{type(error).__name__}: {error}") from error


def _written(program: Program) -> bytes:
    graphs = GraphWriter()
    kinds: dict[int, int] = {}
    distinct: list[Kind] = []
    for stage in program.stages:
        if id(stage.kind) not in kinds:
            kinds[id(stage.kind)] = len(distinct)
            distinct.append(stage.kind)
    constants, values = write_constants(program.constants)
    content: dict[str, Any] = {
        "name": program.name,
        "stages": [_write_stage(stage, kinds[id(stage.kind)]) for stage in program.stages],
        "weights": [_write_weight(name, spec) for name, spec in program.weights.items()],
        "values": [_write_value(name, spec) for name, spec in program.values.items()],
        "inputs": list(program.inputs),
        "constants": constants,
        "prelude": None if program.prelude is None else graphs.executable(program.prelude),
        "prelude_inputs": list(program.prelude_inputs),
        "prelude_outputs": list(program.prelude_outputs),
        "results": list(program.results),
        "graph_digest": program.graph_digest,
        "kinds": [write_kind(kind, graphs) for kind in distinct],
    }
    content["tables"] = graphs.tables()
    try:
        text = json.dumps(content, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise NotSerializableError(f"a program has a field of another type: {error}") from error
    return b"".join((len(text).to_bytes(_LENGTH_BYTES, "little"), text, *values))


def _program(have: dict[str, Any], data: memoryview) -> Program:
    graphs = GraphReader(fields.mapping(have["tables"], ("targets", "tensors")))
    kinds = [read_kind(kind, graphs) for kind in fields.items(have["kinds"])]
    stages = enumerate(fields.items(have["stages"]))
    lines = have["prelude"]
    prelude = None if lines is None else graphs.executable(lines, "prelude")
    prelude_inputs = fields.texts(have["prelude_inputs"])
    prelude_outputs = fields.texts(have["prelude_outputs"])
    takes = (0, 0) if prelude is None else arity(prelude.graph)
    if takes != (len(prelude_inputs), len(prelude_outputs)):
        raise MalformedError(f"the prelude has {takes} values")
    return Program(
        name=fields.text(have["name"]),
        stages=tuple(_read_stage(index, stage, kinds) for index, stage in stages),
        weights={s.name: s for s in map(_read_weight, fields.items(have["weights"]))},
        values={s.name: s for s in map(_read_value, fields.items(have["values"]))},
        inputs=fields.texts(have["inputs"]),
        constants=read_constants(have["constants"], data),
        prelude=prelude,
        prelude_inputs=prelude_inputs,
        prelude_outputs=prelude_outputs,
        results=fields.texts(have["results"]),
        graph_digest=fields.text(have["graph_digest"]),
    )


def _write_stage(stage: Stage, kind: int) -> list[Any]:
    names = list(stage.weights), list(stage.inputs), list(stage.outputs)
    return [stage.name, kind, *names, stage.first_dropout]


def _read_stage(index: int, value: Any, kinds: list[Kind]) -> Stage:
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


def _write_weight(name: str, spec: WeightSpec) -> list[Any]:
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


def _read_weight(value: Any) -> WeightSpec:
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


def _write_value(name: str, spec: ValueSpec) -> list[Any]:
    if spec.name != name:
        raise NotSerializableError(f"value {name} is {spec}")
    return [name, write_spec(spec.tensor), spec.source, spec.requires_grad]


def _read_value(value: Any) -> ValueSpec:
    name, tensor, source, requires_grad = fields.items(value, 4)
    if fields.text(source) not in _SOURCES:
        raise MalformedError(f"expected the source of a value, got {source!r:.80}")
    return ValueSpec(
        name=fields.text(name),
        tensor=read_spec(tensor),
        source=cast(Literal["input", "constant", "prelude", "stage"], source),
        requires_grad=fields.flag(requires_grad),
    )
