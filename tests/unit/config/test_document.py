"""Written YAML reads back equal, here and in a reader of YAML 1.1."""

import math

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from penstock.config import Config
from penstock.config.document import dump, dump_inline, dump_tables, parse, parse_scalar

# Strings that some version of YAML reads as another type, or as its syntax.
NUMBERS = ["08", "1e5", "7e10", "+.5", "0x1F", "0o7", "1_000", "1:30", ".inf", ".NaN"]
WORDS = ["no", "on", "null", "~", "", "true", "2020-01-01", "<<", "=", "...", "---", "\x85 ", "\r"]
SYNTAX = ["&a", "*a", "!x", "%a", "? a", "- a", "a: b", "a #b", "[a", "{a", "\u2028a", "\ufeff"]
STRINGS = (
    st.sampled_from([*NUMBERS, *WORDS, *SYNTAX])
    | st.from_regex(r"\A[-+.0-9_eExon]{1,6}\Z")
    | st.text(max_size=12)
)
SCALARS = (
    STRINGS
    | st.integers(1 - 2**64, 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(STRINGS, VALUES, max_size=3))
@settings(max_examples=150, deadline=None)
def test_written_values_read_back_equal(values):
    for write in (dump, dump_tables, dump_inline):
        assert repr(parse(write(values), "text")[0]) == repr(values)  # 1 == 1.0 == True
    for value in values.values():
        assert repr(parse_scalar(dump_inline(value))) == repr(value)


@pytest.mark.parametrize("text", [*NUMBERS, *WORDS, *SYNTAX])
def test_strings_read_back_equal_in_both_versions_of_yaml(text):
    written = dump({"key": text, text: [text]})
    assert parse(written, "text")[0] == {"key": text, text: [text]}
    assert yaml.safe_load(written) == {"key": text, text: [text]}


@pytest.mark.parametrize("text", ["08", "1e5", "7e10"])
def test_configuration_with_strings_like_numbers_reads_back_equal(text):
    config = Config.from_mapping(
        {
            "model": {"factory": "a.b:c", "args": {"name": text, "sizes": [text, 8]}},
            "data": {"input": [text], "path": text},
            "run": {"dir": text},
        }
    )
    assert Config.from_mapping(parse(config.dump_yaml(), "text")[0]) == config


def test_infinite_number_of_a_model_reads_back():
    fields = {"model_type": "mamba2", "time_step_limit": [0.0, math.inf]}
    config = Config.from_mapping({"model": {"hf_config": fields}})
    assert Config.from_mapping(parse(config.dump_yaml(), "text")[0]) == config
