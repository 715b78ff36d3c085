"""Compares what the compiler makes of PyTorch's own export with what it makes of a lean one."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import fx

from penstock.compiler import capture as capturing
from penstock.compiler.capture import Capture
from penstock.compiler.nodes import source_line
from penstock.errors import PenstockError
from penstock.program import Program


@contextmanager
def full_tracing() -> Iterator[None]:
    """Exports as PyTorch does by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "lean_tracing", nullcontext)
        patch.setattr(capturing, "simple_copies", nullcontext)
        yield


def result_of(make: Callable[[], Any]) -> Any:
    """The result, or the text of the refusal."""
    try:
        return make()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"


def nodes_of(captured: Capture) -> list[Any]:
    """Each node, with everything that a compilation reads of it."""
    return [
        (
            node.op,
            node.name,
            str(node.target),
            str(node.args),
            str(node.kwargs),
            result_meta(node),
            str(node.meta.get("nn_module_stack")),
            source_line(node),
        )
        for node in captured.graph.nodes
    ]


def result_meta(node: fx.Node) -> Any:
    value = node.meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [
        (tuple(p.shape), p.stride(), p.dtype, p.requires_grad)
        if isinstance(p, torch.Tensor)
        else repr(p)
        for p in parts
    ]


def facts_of(program: Program) -> dict[str, Any]:
    """All fields of a program, comparable; executables are represented by their graphs."""
    facts = {f.name: getattr(program, f.name) for f in dataclasses.fields(program)}
    facts["prelude"] = str(getattr(program.prelude, "graph", None))
    facts["constants"] = {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in program.constants.items()
    }
    facts["stages"] = [
        {
            **{f.name: getattr(stage, f.name) for f in dataclasses.fields(stage)},
            "kind": stage.kind.digest,
        }
        for stage in program.stages
    ]
    kinds = {stage.kind.digest: stage.kind for stage in program.stages}
    facts["kinds"] = {
        digest: {
            f.name: getattr(kind, f.name)
            for f in dataclasses.fields(kind)
            if f.name not in ("forward", "infer", "backward", "recompute", "turn", "graphs")
        }
        | {"graphs": {name: str(graph) for name, graph in kind.graphs.items()}}
        for digest, kind in kinds.items()
    }
    return facts


def assert_same(make: Callable[[], Any], facts: Callable[[Any], Any]) -> None:
    """Assert that both ways give the same result or the same refusal."""
    lean = result_of(make)
    with full_tracing():
        full = result_of(make)
    if isinstance(full, str) or isinstance(lean, str):
        assert lean == full
    else:
        assert facts(lean) == facts(full)
