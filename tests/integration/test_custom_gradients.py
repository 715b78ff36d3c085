"""Runs at default settings of models whose gradients are not those of their forwards."""

import functools
from dataclasses import replace

import pytest
import torch
from grids import quick_first
from plain_training import Recipe, assert_same_training, plain, streamed, trained_by, trainer_of
from tiny_models import CONTRASTIVE, PERCEPTRON, Case, mean_squared_error
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from penstock.errors import CompileError
from penstock.models import InputSpec, ModelSource


class Quantise(Function):
    """Eight levels; the gradient passes within the range (Bengio et al., 2013)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x.clamp(-1, 1) * 4).round() / 4

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Reverse(Function):
    """The identity whose gradient is turned round (Ganin and Lempitsky, 2015)."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class Saturating(Function):
    """tanh in the new style; its gradient does not vanish where it saturates."""

    @staticmethod
    def forward(x, weight):
        return torch.tanh(x @ weight.t())

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, grad):
        x, weight, output = ctx.saved_tensors
        inner = grad * (1 - output.square()).clamp(min=0.2)
        return inner @ weight, inner.t() @ x


class Quantised(nn.Module):
    """A perceptron that only learns if the gradient passes the rounding."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 if i == 0 else 24, 24) for i in range(3))
        self.head = nn.Linear(24, 2)

    def forward(self, x):
        for layer in self.layers:
            x = Quantise.apply(layer(x))
        return self.head(x)


class Adversarial(nn.Module):
    """Two views are to agree, while a critic behind a reversed gradient is to tell them apart."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(12)
        # The reversed gradient nearly cancels for the bias: if it began at zero, it would consist
        # of rounding errors, which AdamW makes as large as any other change.
        nn.init.normal_(self.norm.bias)
        self.critic = nn.Linear(12, 1)

    def embed(self, x):
        for block in self.blocks:
            x = x + Saturating.apply(x, block.weight)
        return self.norm(x)

    def forward(self, left, right):
        one, other = self.embed(left), self.embed(right)
        agree = F.mse_loss(one, other)
        seen = self.critic(Reverse.apply(torch.stack([one, other]), 0.5)).squeeze(-1)
        return agree + F.softplus(seen[0]).mean() + F.softplus(-seen[1]).mean()


def built(build, **options):
    def source(seed):
        torch.manual_seed(seed)
        return ModelSource.from_module(build(), **options)

    return source


VIEWS = {"left": InputSpec((12,)), "right": InputSpec((12,))}
ADVERSARIAL = replace(
    CONTRASTIVE, name="adversarial", build=Adversarial, source=built(Adversarial, inputs=VIEWS)
)
QUANTISED = replace(
    PERCEPTRON,
    name="quantised",
    build=Quantised,
    source=built(
        Quantised,
        loss=mean_squared_error,
        inputs={"x": InputSpec((6,))},
        targets={"y": InputSpec((2,))},
    ),
)


@pytest.mark.parametrize("seed", quick_first([0, 1], [0]))
def test_twenty_steps_agree_with_plain_pytorch_with_custom_gradients(seed, tmp_path):
    recipe = Recipe(seed=seed)
    assert_same_training(streamed(ADVERSARIAL, recipe, tmp_path), ADVERSARIAL, recipe)


def test_straight_through_estimator_learns_as_in_plain_pytorch(tmp_path):
    recipe = Recipe(steps=60, learning_rate=1e-2)
    ours, reference = streamed(QUANTISED, recipe, tmp_path), plain(QUANTISED, recipe)
    # A value at the edge of two levels may be rounded to either, so not to float32 rounding.
    assert ours.losses == pytest.approx(reference.losses, rel=0.02)
    first, last = sum(reference.losses[:8]), sum(reference.losses[-8:])
    assert last < 0.8 * first


@pytest.mark.parametrize("case", [ADVERSARIAL, QUANTISED], ids=lambda case: case.name)
def test_bfloat16_trains_near_float32_with_custom_gradients(case, tmp_path):
    recipe = Recipe()
    ours = streamed(case, recipe, tmp_path, precision="bf16")
    reference = plain(case, recipe)
    assert ours.losses == pytest.approx(reference.losses, rel=0.1)
    assert ours.losses[-1] < 0.97 * ours.losses[0]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_engines_and_recomputation_change_no_bit_with_custom_gradients(precision, tmp_path):
    recipe = Recipe(steps=6)
    found = set()
    for number, changes in enumerate(
        [{}, {"engines": 2}, {"engine": {"recompute": "always"}}, {"engines": 4}]
    ):
        trainer, events = trainer_of(
            ADVERSARIAL, recipe, tmp_path / str(number), precision=precision, **changes
        )
        trainer.train()
        found.add((trainer.store.content_hash(), *trained_by(trainer, events).losses))
    assert len(found) == 1


def halve(gradient):
    return gradient / 2


def hooked(case: Case, add, when: str):
    """Return the case with a hook put on its module before or after the source is made of it."""

    def source(seed):
        torch.manual_seed(seed)
        module = case.build()
        if when == "before":
            add(module)
        made = ModelSource.from_module(module, inputs=VIEWS)
        if when == "after":
            add(module)
        return made

    return replace(case, source=source)


WHERE = f"halve at {__file__}:{halve.__code__.co_firstlineno}"
WAY_OUT = (
    "which no compiled program calls. To change a gradient, apply a torch.autograd.Function with "
    "that backward in the forward; a hook that only reads a gradient must be removed."
)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("add", "what"),
    [
        (
            lambda m: m.blocks[1].weight.register_hook(halve),
            "parameter blocks.1.weight has a hook on its gradient (register_hook)",
        ),
        (
            lambda m: m.blocks[1].weight.register_post_accumulate_grad_hook(halve),
            "parameter blocks.1.weight has a hook (register_post_accumulate_grad_hook)",
        ),
        (
            lambda m: m.norm.register_full_backward_hook(halve),
            "norm (LayerNorm) has a full backward hook",
        ),
        (
            lambda m: m.norm.register_full_backward_pre_hook(halve),
            "norm (LayerNorm) has a full backward pre-hook",
        ),
    ],
    ids=["parameter", "accumulated", "module", "pre"],
)
def test_trainer_refuses_a_model_with_hooks_on_gradients(add, what, when, tmp_path):
    with pytest.raises(CompileError) as caught:
        trainer_of(hooked(ADVERSARIAL, add, when), Recipe(), tmp_path)
    assert str(caught.value) == f"{what}, {WHERE}, {WAY_OUT}"


def hooks_itself():
    """A factory whose module hooks a parameter of its own, as a configuration names it."""
    module = Adversarial()
    module.blocks[1].weight.register_hook(halve)
    return module


def test_trainer_refuses_a_factory_that_hooks_a_parameter(tmp_path):
    reference = "test_custom_gradients:hooks_itself"
    case = replace(
        ADVERSARIAL, source=lambda seed: ModelSource.from_factory(reference, inputs=VIEWS)
    )
    with pytest.raises(CompileError) as caught:
        trainer_of(case, Recipe(), tmp_path)
    what = "parameter blocks.1.weight has a hook on its gradient (register_hook)"
    assert str(caught.value) == f"{what}, {WHERE}, {WAY_OUT}"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_transformers_changes_no_bit(reentrant, tmp_path):
    from tiny_models import FIELDS, language_model
    from transformers import AutoConfig, AutoModelForCausalLM

    case, recipe = language_model("llama"), Recipe(steps=6)
    build = functools.partial(AutoConfig.for_model, "llama", **FIELDS["llama"])

    def source(seed, enable):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(build(), dtype=torch.float32)
        if enable:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        return ModelSource.from_module(model)

    runs = [
        streamed(replace(case, source=functools.partial(source, enable=enable)), recipe, folder)
        for enable, folder in [(False, tmp_path / "a"), (True, tmp_path / "b")]
    ]
    assert runs[0].losses == runs[1].losses
    for name, weight in runs[0].weights.items():
        assert torch.equal(weight, runs[1].weights[name]), name
