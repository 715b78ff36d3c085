"""The gradient of a `torch.autograd.Function` is what its backward says, as in plain PyTorch."""

import copy
import re

import pytest
import torch
from custom_functions import (
    CALLS,
    WIDTH,
    Doubled,
    Halves,
    Reverse,
    SavesAll,
    assert_equal_gradients,
    net,
    plain,
    round_through,
)
from grids import quick_first
from sweeps import compiled, one_step
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock.engine import EnginePlan
from penstock.errors import CompileError


@pytest.mark.parametrize("name", CALLS)
def test_gradients_equal_plain_pytorch_with_custom_function(name):
    module, rows = net(CALLS[name])
    assert_equal_gradients(one_step(module, [rows]), plain(module, rows))


def mixed(self, x):
    y = Doubled.apply(round_through(x), self.weight, self.bias)
    y = F.dropout(Reverse.apply(y), 0.25, self.training)
    return SavesAll.apply(y + Halves.apply(x)[1])[0]


def test_equal_blocks_share_a_kind_with_custom_functions():
    module, rows = net(mixed)
    program = compiled(module, rows)
    kinds = {stage.name: stage.kind for stage in program.stages}
    assert kinds["blocks.1"] is kinds["blocks.2"]
    other, _ = net(lambda self, x: mixed(self, x) * 2)
    assert compiled(other, rows).stages[1].kind.digest != kinds["blocks.1"].digest


def test_blocks_with_different_backwards_have_different_kinds():
    module, rows = net(CALLS["straight_through"])
    module.blocks[2].apply_function = lambda x: round_through(x, 0.25)
    kinds = {stage.name: stage.kind.digest for stage in compiled(module, rows).stages}
    assert kinds["blocks.0"] == kinds["blocks.1"] != kinds["blocks.2"]
    assert_equal_gradients(one_step(module, [rows]), plain(module, rows))


def test_compiled_functions_hold_only_operators_with_custom_functions():
    module, rows = net(CALLS["nested"])
    for stage in compiled(module, rows).stages:
        for graph in stage.kind.graphs.values():
            targets = {n.target for n in graph.nodes if n.op == "call_function"}
            own = {t for t in targets if not isinstance(t, torch._ops.OpOverload)}
            assert {t.__name__ for t in own} <= {"getitem"}


@pytest.mark.long
@pytest.mark.parametrize(
    "options", quick_first([{}, {"slot_bytes": 200}], [{"slot_bytes": 200}]), ids=["whole", "cut"]
)
def test_recomputed_stages_give_the_same_bits_with_custom_functions(options):
    module, rows = net(mixed)
    kept = one_step(module, [rows, rows], **options)
    stages = range(len(compiled(module, rows, **options).stages) - 1)
    made_again = one_step(module, [rows, rows], EnginePlan(recompute=frozenset(stages)), **options)
    assert kept.losses == made_again.losses
    for name, gradient in kept.gradients.items():
        assert torch.equal(gradient, made_again.gradients[name]), name
        assert gradient.any(), name


@pytest.mark.parametrize("name", ["weight_as_argument", "two_outputs", "reversal", "nested"])
def test_cut_stages_give_the_same_gradients_with_custom_functions(name):
    module, rows = net(CALLS[name])
    cut = one_step(module, [rows], slot_bytes=200)
    assert len(compiled(module, rows, slot_bytes=200).stages) > 6
    assert_equal_gradients(cut, plain(module, rows))


@pytest.mark.parametrize("frozen", [("inlet.*", "blocks.0.before.*"), ("blocks.*.bias",)])
def test_needs_input_grad_is_false_for_frozen_inputs(frozen):
    module, rows = net(CALLS["needs_input_grad"])
    step = one_step(module, [rows], freeze=frozen)
    assert all(p.requires_grad for p in module.parameters())
    for pattern in frozen:
        for name, parameter in module.named_parameters():
            if re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), name):
                parameter.requires_grad_(False)
    loss, gradients = plain(module, rows)
    trained = {n: g for n, g in gradients.items() if module.get_parameter(n).requires_grad}
    assert trained.keys() == step.gradients.keys()
    assert_equal_gradients(step, (loss, trained))


@pytest.mark.parametrize(
    "name",
    quick_first(["straight_through", "weight_as_argument", "saved_values"], ["saved_values"]),
)
def test_bfloat16_gradients_are_those_of_a_bfloat16_module_with_custom_functions(name):
    module, rows = net(CALLS[name])
    step = one_step(module, [rows], precision="bf16")
    lower = copy.deepcopy(module).bfloat16()
    loss, gradients = plain(lower, {"x": rows["x"].bfloat16()})
    assert step.losses == pytest.approx([loss], rel=2e-2)
    for weight, gradient in gradients.items():
        scale = float(gradient.abs().max())
        have = step.gradients[weight].float()
        assert float((have - gradient.float()).abs().max()) <= 0.05 * scale, weight


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


def symmetric(layer):
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def parametrized(wrap):
    module, rows = net(lambda self, x: self.before(x))
    for one in module.blocks:
        one.before = wrap(one.before)
    return module, rows


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.orthogonal, symmetric]
)
def test_parametrized_weights_train_as_in_plain_pytorch(wrap):
    module, rows = parametrized(wrap)
    assert_equal_gradients(one_step(module, [rows]), plain(module, rows))


def test_spectral_norm_is_refused():
    module, rows = parametrized(parametrizations.spectral_norm)
    with pytest.raises(CompileError, match=r"blocks\.0\.before|_u|buffer"):
        compiled(module, rows)


class EndsInACheckpoint(nn.Module):
    """Returns the very result of a checkpoint, which an export keeps in a region of its own."""

    def __init__(self):
        super().__init__()
        self.inlet, self.outlet = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        return checkpoint(self.outlet, self.inlet(x), use_reentrant=True)


def test_evaluation_returns_the_result_of_a_checkpoint():
    program = compiled(EndsInACheckpoint(), {"x": torch.zeros(5, WIDTH)}, training=False)
    (result,) = program.results
    assert program.values[result].tensor.shape == (5, 2)
