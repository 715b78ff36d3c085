"""An export with short stack traces makes the program of PyTorch's own export."""

import dataclasses
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from families import FAMILIES, fields
from random_modules import RandomModule
from tiny_models import CASES
from torch import fx, nn
from torch.fx.experimental import proxy_tensor
from views_and_writes import ROWS, WIDTH

from penstock.compiler import capture as capturing
from penstock.compiler import compile_module
from penstock.compiler.capture import Capture, capture
from penstock.compiler.lean_tracing import lean_tracing
from penstock.compiler.nodes import source_line
from penstock.errors import PenstockError
from penstock.models import ModelSource
from penstock.planning.builders import compile_source
from penstock.program import Program


@contextmanager
def full_tracing() -> Iterator[None]:
    """Exports as PyTorch does by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "lean_tracing", nullcontext)
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_program_of_a_family_is_that_of_a_full_export(family, precision):
    source = ModelSource.from_hf_config(fields(family))

    def program() -> Program:
        return compile_source(
            source, micro_batch=2, length=8, precision=precision, with_buffers=False
        )

    assert_same(program, facts_of)


@pytest.mark.parametrize("preset", ["gpt3-125m", "cerebras-gpt-111m", "llama-7b", "bert-base"])
def test_program_of_a_preset_is_that_of_a_full_export(preset):
    source = ModelSource.from_preset(preset, {"num_hidden_layers": 3})

    def program() -> Program:
        return compile_source(source, micro_batch=1, length=8, precision="fp32", with_buffers=False)

    assert_same(program, facts_of)


@pytest.mark.parametrize("name", CASES)
def test_graph_of_a_model_is_that_of_a_full_export(name):
    source = CASES[name]().source(0)
    inputs = source.example_inputs(2, 8)
    assert_same(lambda: capture(source.module, inputs), nodes_of)


@pytest.mark.parametrize("seed", range(25))
def test_graph_of_a_random_module_is_that_of_a_full_export(seed):
    inputs = {name: torch.zeros(ROWS, WIDTH) for name in ("x", "z", "y")}
    assert_same(lambda: capture(RandomModule(seed), inputs), nodes_of)


@pytest.mark.parametrize("seed", range(5))
def test_program_of_a_random_module_is_that_of_a_full_export(seed):
    inputs = {name: torch.zeros(ROWS, WIDTH) for name in ("x", "z", "y")}
    assert_same(lambda: compile_module(RandomModule(seed), inputs), facts_of)


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def test_export_prints_no_stack():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traceback.StackSummary, "format", None)  # would be called for every node
        captured = capture(Square(), {"x": torch.zeros(2, 4)})
    traced = [node for node in captured.graph.nodes if node.op == "call_function"]
    assert len(traced) == 3
    for node in traced:
        assert node.meta["stack_trace"].count("\n") == 0
        assert "in forward" in node.meta["stack_trace"]


def test_tracing_is_as_before_after_an_error():
    before = (
        proxy_tensor._ModuleStackTracer.create_node,
        proxy_tensor._extract_tensor_metadata,
        fx.config.do_not_emit_stack_traces,
    )
    with pytest.raises(ValueError, match="of the model"), lean_tracing():
        raise ValueError("of the model")
    assert before == (
        proxy_tensor._ModuleStackTracer.create_node,
        proxy_tensor._extract_tensor_metadata,
        fx.config.do_not_emit_stack_traces,
    )
