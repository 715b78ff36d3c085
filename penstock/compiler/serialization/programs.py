"""A program as bytes: the length of a JSON text, the text, and the values of constants."""

from collections.abc import Collection
from typing import Any

from penstock.compiler.cached_attention import write_row
from penstock.compiler.decoding import CACHE
from penstock.compiler.serialization import fields
from penstock.compiler.serialization.constants import read_constants, write_constants
from penstock.compiler.serialization.fields import MalformedError, NotSerializableError
from penstock.compiler.serialization.graphs import GraphReader, GraphWriter
from penstock.compiler.serialization.kinds import arity, distinct_kinds, read_kind, write_kind
from penstock.compiler.serialization.parts import (
    read_stage,
    read_value,
    read_weight,
    write_stage,
    write_value,
    write_weight,
)
from penstock.errors import ProgramError
from penstock.program import Program, Stage, verify

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
    "whole_window_reason",
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
    content, values = fields.unframed(data)
    try:
        return verify(_program(fields.mapping(content, _KEYS), values))
    except MalformedError:
        raise
    except (ValueError, TypeError, OverflowError, RuntimeError, ProgramError) as error:
        # Of JSON (also of its depth), of PyTorch for impossible shapes, and of `verify`.
        raise MalformedError(f"{type(error).__name__}: {error}") from error


def _written(program: Program) -> bytes:
    graphs = GraphWriter()
    distinct, kinds = distinct_kinds(program)
    constants, values = write_constants(program.constants)
    content: dict[str, Any] = {
        "name": program.name,
        "stages": [write_stage(stage, kinds[stage.index]) for stage in program.stages],
        "weights": [write_weight(name, spec) for name, spec in program.weights.items()],
        "values": [write_value(name, spec) for name, spec in program.values.items()],
        "inputs": list(program.inputs),
        "constants": constants,
        "prelude": None if program.prelude is None else graphs.executable(program.prelude),
        "prelude_inputs": list(program.prelude_inputs),
        "prelude_outputs": list(program.prelude_outputs),
        "results": list(program.results),
        "graph_digest": program.graph_digest,
        "whole_window_reason": program.whole_window_reason,
        "kinds": [write_kind(kind, graphs) for kind in distinct],
    }
    content["tables"] = graphs.tables()
    return fields.framed(content, *values)


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
    read = tuple(read_stage(index, stage, kinds) for index, stage in stages)
    for stage in read:
        _require_writable(stage, set(fields.texts(have["inputs"])))
    return Program(
        name=fields.text(have["name"]),
        stages=read,
        weights={s.name: s for s in map(read_weight, fields.items(have["weights"]))},
        values={s.name: s for s in map(read_value, fields.items(have["values"]))},
        inputs=fields.texts(have["inputs"]),
        constants=read_constants(have["constants"], data),
        prelude=prelude,
        prelude_inputs=prelude_inputs,
        prelude_outputs=prelude_outputs,
        results=fields.texts(have["results"]),
        graph_digest=fields.text(have["graph_digest"]),
        whole_window_reason=fields.text(have["whole_window_reason"]),
    )


def _require_writable(stage: Stage, inputs: Collection[str]) -> None:
    """Reject an executable that writes into something else than kept keys or values."""
    for name, graph in stage.kind.graphs.items():
        given = graph.find_nodes(op="placeholder")
        read = [] if name == "backward" else given[len(stage.kind.weights) :]
        kept = {
            node
            for node, value in zip(read, stage.inputs, strict=False)
            if value in inputs and value.startswith(CACHE.format(""))
        }
        for node in graph.find_nodes(op="call_function", target=write_row):
            if node.args[0] not in kept:
                raise MalformedError(f"stage {stage.name} writes into {node.args[0]}")
