"""Which token continues a text, and logits that choose none."""

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError, NonFiniteError
from penstock.training.evaluation import _exp
from penstock.training.sampling import Sampling
from penstock.training.token_generation import generate_tokens

INFINITE, NAN = float("inf"), float("nan")


def tokens_of(logits, count=1, **options):
    """Return the tokens that are chosen by the same logits after every text."""
    sampling = Sampling(max_new_tokens=count, **options)
    return list(generate_tokens(lambda text: torch.tensor(logits), [0, 0], sampling))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("top_k", [1, None])
@pytest.mark.parametrize("logits", [[NAN, 1.0], [1.0, INFINITE], [-INFINITE] * 2])
def test_logits_that_are_not_finite_choose_no_token(logits, top_k, temperature):
    with pytest.raises(NonFiniteError, match=r"largest logit of the next token is (nan|-?inf)"):
        tokens_of(logits, temperature=temperature, top_k=top_k)


def test_tokens_that_the_model_rules_out_are_never_chosen():
    assert set(tokens_of([-INFINITE, 1.0, 1.0], 40, top_k=None)) == {1, 2}


WRONG = [
    *(("max_new_tokens", value, "a whole number from 0 up") for value in (2.5, -1, True, None)),
    *(
        ("temperature", value, "a finite number from 0 up")
        for value in (-0.1, NAN, INFINITE, None, "1", True, 10**400)
    ),
    *(("top_k", value, "a whole number from 1 up") for value in (2.5, 0, -1, True, "5")),
    *(("seed", value, "a whole number from 0 up") for value in (1.5, -1, True, None)),
    *(("stop", value, "a whole number from 0 up") for value in (2.5, -1, True)),
    *(("vocabulary", value, "a whole number from 1 up") for value in (2.5, 0, -1, True)),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_option_without_meaning_is_refused(name, value, expected):
    said = f"^{name}: expected {expected}, got {value!r}; give "
    with pytest.raises(ConfigError, match=said):
        Sampling(**{name: value})


def test_options_of_numpy_are_those_of_python():
    options = {"temperature": 0.5, "top_k": 2, "seed": 3, "vocabulary": 3}
    of_numpy = {name: np.asarray(value)[()] for name, value in options.items()}
    logits = [0.0, 1.0, 2.0, 3.0]
    assert tokens_of(logits, np.int64(8), **of_numpy) == tokens_of(logits, 8, **options)


def test_temperature_close_to_0_chooses_as_0_does():
    assert tokens_of([0.0, 1.0, 0.5], temperature=1e-320) == [1]


def test_perplexity_of_nan_is_nan():
    assert str(_exp(NAN)) == "nan"
    assert (_exp(0.0), _exp(1e4)) == (1.0, INFINITE)
