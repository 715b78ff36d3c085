"""Training by weight streaming is the same training: float32 against a plain PyTorch loop."""

import pytest
import torch
from grids import quick_first, thinned
from plain_training import Recipe, assert_same_training, streamed
from tiny_models import CASES, deepseek, language_model, t5

EVERY_TIME = ("gpt2", "llama", "perceptron", "classifier", "contrastive")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", quick_first(CASES, EVERY_TIME))
def test_twenty_steps_agree_with_plain_pytorch(name, seed, tmp_path):
    case, recipe = CASES[name](), Recipe(seed=seed)
    assert_same_training(streamed(case, recipe, tmp_path), case, recipe)


@pytest.mark.long
def test_gpt2_with_untied_head_agrees_with_plain_pytorch(tmp_path):
    case, recipe = language_model("gpt2", tie_word_embeddings=False), Recipe(seed=2, steps=10)
    ours = streamed(case, recipe, tmp_path)
    assert "lm_head.weight" in ours.weights
    assert_same_training(ours, case, recipe)


@pytest.mark.parametrize("case", quick_first([deepseek, t5], []), ids=lambda case: case.__name__)
def test_families_that_write_in_place_agree_with_plain_pytorch(case, tmp_path):
    case, recipe = case(), Recipe(seed=4, steps=6)
    assert_same_training(streamed(case, recipe, tmp_path), case, recipe)


@pytest.mark.parametrize(
    ("family", "frozen"),
    [
        ("gpt2", ("transformer.wte.*", "*.ln_1.*")),  # the tied embedding, used at both ends
        pytest.param(  # nothing left to send back
            "llama", ("model.embed_tokens.weight", "model.layers.0.*"), marks=pytest.mark.long
        ),
        pytest.param(  # a gradient passes through a frozen block
            "opt", ("model.decoder.layers.1.*",), marks=pytest.mark.long
        ),
        pytest.param(  # the last stage has no gradient
            "qwen3", ("lm_head.weight", "model.norm.weight"), marks=pytest.mark.long
        ),
    ],
)
def test_frozen_weights_stay_and_others_agree_with_plain_pytorch(family, frozen, tmp_path):
    case, recipe = language_model(family), Recipe(seed=3, steps=10, freeze=frozen)
    ours = streamed(case, recipe, tmp_path)
    assert_same_training(ours, case, recipe)
    start = dict(case.plain(recipe.seed).named_parameters())
    assert torch.equal(ours.weights[_some(start, frozen[0])], start[_some(start, frozen[0])])


def _some(names, pattern):
    import fnmatch

    return fnmatch.filter(names, pattern)[0]


@pytest.mark.parametrize(("seed", "nesterov"), thinned([0, 1], [False, True]))
def test_sgd_with_momentum_agrees_with_plain_pytorch(seed, nesterov, tmp_path):
    settings = {"name": "sgd", "momentum": 0.8, "nesterov": nesterov}
    case = language_model("gpt2")
    recipe = Recipe(seed=seed, steps=10, learning_rate=0.1, optimizer=settings)
    assert_same_training(
        streamed(case, recipe, tmp_path),
        case,
        recipe,
        lambda groups: torch.optim.SGD(groups, lr=0.0, momentum=0.8, nesterov=nesterov),
    )


class PlainLion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, one tensor after the other."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("m", torch.zeros_like(weight))
                direction = (0.9 * momentum + 0.1 * weight.grad).sign()
                weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                momentum.mul_(0.99).add_(weight.grad, alpha=0.01)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_lion_agrees_with_the_reference(seed, tmp_path):
    case = language_model("llama")
    recipe = Recipe(seed=seed, steps=10, learning_rate=1e-3, optimizer={"name": "lion"})
    assert_same_training(streamed(case, recipe, tmp_path), case, recipe, PlainLion)


def test_comparison_detects_a_wrong_run(tmp_path):
    """One step's rate off by a hundredth is hundreds of times what rounding does."""
    case, recipe = language_model("gpt2"), Recipe()
    wrong = Recipe(final_ratio=recipe.final_ratio + 0.002)
    with pytest.raises(AssertionError):
        assert_same_training(streamed(case, wrong, tmp_path), case, recipe)
