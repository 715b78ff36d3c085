"""The outline of a program as bytes: all that planning reads, without the graphs.

An outline is read without the parts of PyTorch that trace and represent graphs, and in a fraction
of the time. It cannot be executed.
"""

import json
from typing import Any

import torch

from penstock.compiler.serialization import fields
from penstock.compiler.serialization.fields import MalformedError, NotSerializableError
from penstock.compiler.serialization.kinds import (
    distinct_kinds,
    not_executable,
    read_kind,
    write_kind,
)
from penstock.compiler.serialization.parts import (
    read_stage,
    read_value,
    read_weight,
    write_stage,
    write_value,
    write_weight,
)
from penstock.errors import ProgramError
from penstock.program import Program, verify

_KEYS = (
    "name",
    "stages",
    "weights",
    "values",
    "inputs",
    "constants",
    "has_prelude",
    "prelude_inputs",
    "prelude_outputs",
    "results",
    "graph_digest",
    "kinds",
)


def write_outline(program: Program) -> bytes:
    """Return the written form of a program's outline.

    Raises:
        NotSerializableError: the program contains something that has no written form.
    """
    kinds, numbers = distinct_kinds(program)
    content: dict[str, Any] = {
        "name": program.name,
        "stages": [write_stage(stage, numbers[stage.index]) for stage in program.stages],
        "weights": [write_weight(name, spec) for name, spec in program.weights.items()],
        "values": [write_value(name, spec) for name, spec in program.values.items()],
        "inputs": list(program.inputs),
        "constants": list(program.constants),
        "has_prelude": program.prelude is not None,
        "prelude_inputs": list(program.prelude_inputs),
        "prelude_outputs": list(program.prelude_outputs),
        "results": list(program.results),
        "graph_digest": program.graph_digest,
        "kinds": [write_kind(kind, None) for kind in kinds],
    }
    try:
        return json.dumps(content, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise NotSerializableError(f"a program has a field of another type: {error}") from error


def read_outline(data: bytes | memoryview) -> Program:
    """Return the program of an outline; its executables raise `ProgramError`.

    Its constants have shape and type, and no values.

    Raises:
        MalformedError: the bytes are not the written form of an outline.
    """
    try:
        return verify(_outline(fields.mapping(json.loads(bytes(data)), _KEYS)))
    except MalformedError:
        raise
    except (ValueError, TypeError, OverflowError, RuntimeError, ProgramError) as error:
        raise MalformedError(f"{type(error).__name__}: {error}") from error


def _outline(have: dict[str, Any]) -> Program:
    kinds = [read_kind(kind, None) for kind in fields.items(have["kinds"])]
    stages = enumerate(fields.items(have["stages"]))
    values = {spec.name: spec for spec in map(read_value, fields.items(have["values"]))}
    constants = {}
    for name in fields.texts(have["constants"]):
        if name not in values:
            raise MalformedError(f"constant {name!r:.80} has no specification")
        spec = values[name].tensor
        constants[name] = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    return Program(
        name=fields.text(have["name"]),
        stages=tuple(read_stage(index, stage, kinds) for index, stage in stages),
        weights={spec.name: spec for spec in map(read_weight, fields.items(have["weights"]))},
        values=values,
        inputs=fields.texts(have["inputs"]),
        constants=constants,
        prelude=not_executable if fields.flag(have["has_prelude"]) else None,
        prelude_inputs=fields.texts(have["prelude_inputs"]),
        prelude_outputs=fields.texts(have["prelude_outputs"]),
        results=fields.texts(have["results"]),
        graph_digest=fields.text(have["graph_digest"]),
    )
