"""Patterns of weight names: what they match, and what is said where they match nothing."""

import pytest

from penstock.errors import ConfigError
from penstock.name_patterns import matches, matching


def test_patterns_are_those_of_the_shell():
    assert matches("h.0.ln_1.bias", ["*.bias"])
    assert matches("h.0.ln_1.bias", ["x", "h.?.ln_*"])
    assert not matches("h.0.ln_1.bias", ["bias", "*.BIAS"])
    names = ["h.0.ln_1.bias", "h.1.ln_1.bias", "wte.weight"]
    assert matching("freeze", ["h.?.ln_*"], names) == {"h.0.ln_1.bias", "h.1.ln_1.bias"}
    assert matching("freeze", ["h.0.*", "wte.weight"], names) == {"h.0.ln_1.bias", "wte.weight"}
    assert matching("freeze", [], names) == set()
    with pytest.raises(ConfigError):
        matching("freeze", ["*.BIAS"], names)


def test_a_pattern_that_matches_nothing_is_refused_by_name():
    with pytest.raises(ConfigError) as raised:
        matching("freeze", ["wte.*", "wpe.weigth"], ["wte.weight", "wpe.weight"])
    assert str(raised.value) == (
        "freeze: pattern 'wpe.weigth' matches no weight (did you mean 'wpe.weight'?); the "
        "model's weights are named like wte.weight, wpe.weight"
    )
