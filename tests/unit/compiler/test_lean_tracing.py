"""An export with short stack traces makes the program of PyTorch's own export."""

import traceback

import pytest
import torch
from compared_programs import assert_same, facts_of, nodes_of
from random_modules import RandomModule
from tiny_models import CASES
from torch import nn
from torch.fx.experimental import proxy_tensor
from views_and_writes import ROWS, WIDTH

from penstock.compiler import compile_module
from penstock.compiler.capture import capture
from penstock.compiler.lean_tracing import lean_tracing
from penstock.models import ModelSource
from penstock.planning.builders import compile_source
from penstock.program import Program


@pytest.mark.long
@pytest.mark.parametrize("preset", ["gpt3-125m", "llama-7b", "bert-base"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_program_of_a_preset_is_that_of_a_full_export(preset, precision):
    source = ModelSource.from_preset(preset, {"num_hidden_layers": 3})

    def program() -> Program:
        return compile_source(
            source, micro_batch=1, length=8, precision=precision, with_buffers=False
        )

    assert_same(program, facts_of)


@pytest.mark.long
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
    def state():
        return (
            proxy_tensor._ModuleStackTracer.create_node,
            proxy_tensor._extract_tensor_metadata,
            dict(vars(proxy_tensor.PythonKeyTracer)),
        )

    before = state()
    with pytest.raises(ValueError, match="of the model"), lean_tracing():
        raise ValueError("of the model")
    assert state() == before
