"""Families of `transformers`, and all presets: the program is that of PyTorch's own export."""

import pytest
from compared_programs import assert_same, facts_of
from test_families import CAUSAL, MASKED

from penstock.config.presets import preset_names
from penstock.models import ModelSource
from penstock.planning.builders import compile_source
from penstock.program import Program

pytestmark = pytest.mark.long


def assert_same_program(source: ModelSource, length: int) -> None:
    def program() -> Program:
        return compile_source(
            source, micro_batch=2, length=length, precision="bf16", with_buffers=False
        )

    assert_same(program, facts_of)


@pytest.mark.parametrize("family", [*CAUSAL, *MASKED])
def test_program_of_a_family_is_that_of_a_full_export(family):
    settings = {"model_type": family, **{**CAUSAL, **MASKED}[family]}
    task = "masked_lm" if family in MASKED else "causal_lm"
    assert_same_program(ModelSource.from_hf_config(settings, task=task), 16)


@pytest.mark.parametrize("preset", preset_names())
def test_program_of_every_preset_is_that_of_a_full_export(preset):
    assert_same_program(ModelSource.from_preset(preset, {"num_hidden_layers": 3}), 32)
