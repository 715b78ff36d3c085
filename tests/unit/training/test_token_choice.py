"""Which token continues a text, and logits that choose none."""

import pytest
import torch

from penstock.errors import ConfigError, NonFiniteError
from penstock.training.evaluation import _exp
from penstock.training.token_generation import generate_tokens

INFINITE, NAN = float("inf"), float("nan")


def tokens_of(logits, count=1, **options):
    """Return the tokens that are chosen by the same logits after every text."""
    return list(
        generate_tokens(lambda text: torch.tensor(logits), [0, 0], max_new_tokens=count, **options)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("top_k", [1, None])
@pytest.mark.parametrize("logits", [[NAN, 1.0], [1.0, INFINITE], [-INFINITE] * 2])
def test_logits_that_are_not_finite_choose_no_token(logits, top_k, temperature):
    with pytest.raises(NonFiniteError, match=r"largest logit of the next token is (nan|-?inf)"):
        tokens_of(logits, temperature=temperature, top_k=top_k)


def test_tokens_that_the_model_rules_out_are_never_chosen():
    assert set(tokens_of([-INFINITE, 1.0, 1.0], 40, top_k=None)) == {1, 2}


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_without_meaning_is_refused(top_k):
    with pytest.raises(ConfigError, match=f"top_k must be 1 or more, .* got {top_k}"):
        tokens_of([0.0, 1.0], top_k=top_k)


@pytest.mark.parametrize("temperature", [-0.1, NAN, INFINITE])
def test_temperature_without_meaning_is_refused(temperature):
    with pytest.raises(ConfigError, match=f"temperature must be 0 or more, got {temperature}"):
        tokens_of([0.0, 1.0], temperature=temperature)


def test_negative_number_of_tokens_is_refused():
    with pytest.raises(ConfigError, match="max_new_tokens must be 0 or more, got -1"):
        tokens_of([0.0, 1.0], -1)


def test_perplexity_of_nan_is_nan():
    assert str(_exp(NAN)) == "nan"
    assert (_exp(0.0), _exp(1e4)) == (1.0, INFINITE)
