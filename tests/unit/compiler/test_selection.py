"""Which weights train: `train` and `freeze` together, with tied weights and adapters."""

import pytest

from penstock.compiler import select_trainable
from penstock.errors import ConfigError

# A tied embedding goes by two names.
WEIGHTS = {
    "wte.weight": ["head.weight"],
    "h.0.ln.weight": [],
    "h.0.ln.bias": [],
    "h.1.ln.weight": [],
    "h.1.ln.bias": [],
}
ADAPTERS = {"h.0.lora_A.weight": [], "h.0.lora_B.weight": []}


def selected(weights=WEIGHTS, fixed=(), **patterns):
    return set(select_trainable(weights, set(weights) - set(fixed), **patterns))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({}, set(WEIGHTS)),
        ({"freeze": ["*.bias"]}, {"wte.weight", "h.0.ln.weight", "h.1.ln.weight"}),
        ({"train": ["h.1.*"]}, {"h.1.ln.weight", "h.1.ln.bias"}),
        ({"train": ["h.1.*"], "freeze": ["*.bias"]}, {"h.1.ln.weight"}),
        ({"train": ["h.0.ln.bias", "h.1.ln.bias"]}, {"h.0.ln.bias", "h.1.ln.bias"}),
        ({"train": ["head.*"]}, {"wte.weight"}),  # either name names the weight
        ({"freeze": ["head.*", "h.*"], "train": ["*"]}, set()),
    ],
)
def test_train_selects_weights_and_freeze_has_precedence(patterns, expected):
    if expected:
        assert selected(**patterns) == expected
    else:
        with pytest.raises(ConfigError, match="freeze has precedence"):
            selected(**patterns)


def test_adapters_train_alone_or_with_selected_weights():
    weights, adapters = {**WEIGHTS, **ADAPTERS}, set(ADAPTERS)
    assert selected(weights, adapters=adapters) == adapters
    assert selected(weights, adapters=adapters, train=["*.ln.bias"]) == {
        *adapters,
        "h.0.ln.bias",
        "h.1.ln.bias",
    }
    assert selected(weights, adapters=adapters, freeze=["*.lora_A.*"]) == {"h.0.lora_B.weight"}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            {"train": ["h.0.ln.wieght"]},
            "train: pattern 'h.0.ln.wieght' matches no weight (did you mean 'h.0.ln.weight'?); "
            "the model's weights are named like wte.weight, head.weight, h.0.ln.weight, "
            "h.0.ln.bias, h.1.ln.weight and 1 more",
        ),
        (
            {"train": ["wte.*", "*.bias"], "freeze": ["h.*.bias"]},
            "train: pattern '*.bias' matches only weights that freeze matches too, and freeze has "
            "precedence; remove them from one of the two",
        ),
        (
            {"train": ["h.1.*"], "fixed": ["h.1.ln.weight", "h.1.ln.bias"]},
            "train: pattern 'h.1.*' matches only weights that the model itself keeps fixed "
            "(requires_grad is False); set it to True there, or remove the pattern",
        ),
    ],
)
def test_a_pattern_without_effect_is_refused(patterns, message):
    with pytest.raises(ConfigError) as caught:
        selected(**patterns)
    assert str(caught.value) == message
