"""What adapters beside Llama 3 70B take of the store and of a checkpoint, by arithmetic alone."""

import math

import pytest
import torch
from store_programs import make_program

from penstock.models import ModelSource
from penstock.store import AdamW, checkpoint_bytes
from penstock.store.flash.layout import BLOCK_ELEMENTS, FlashLayout
from penstock.store.roles import stored_of
from penstock.weight_formats import BFLOAT16, DENSE, SPLIT

LLAMA_3_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
PUBLISHED_PARAMETERS = 70_553_706_496  # of meta-llama/Meta-Llama-3-70B, in its index of safetensors
RANK = 16
ADAPTERS = 80 * RANK * ((8192 + 8192) + (8192 + 1024))  # on q_proj and v_proj
ROLES = AdamW(0.9, 0.95, 1e-8).roles


@pytest.fixture(scope="module")
def source():
    plain = ModelSource.from_hf_config(LLAMA_3_70B)
    return plain.with_adapters(rank=RANK, alpha=32, targets=["*.q_proj.weight", "*.v_proj.weight"])


def program_of(source, precision, is_narrow):
    """One stage per layer, and what is outside of them in one before."""
    layers = [{} for _ in range(81)]
    for name, shape in source.shapes().items():
        number = int(name.split(".")[2]) + 1 if ".layers." in name else 0
        layers[number][name] = shape
    frozen = source.shapes().keys() - source.adapter_weights
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    return make_program(layers, frozen, dtype, narrow=frozen if is_narrow else ())


def roles_of(program):
    return lambda name: stored_of(
        program.weights[name], ROLES if program.weights[name].trainable else ()
    )


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_weights_of_a_70b_model_take_two_bytes_per_element(source, precision):
    program = program_of(source, precision, is_narrow=True)
    assert program.parameters - program.trainable_parameters == PUBLISHED_PARAMETERS
    assert program.trainable_parameters == ADAPTERS
    specs = program.weights.values()
    assert {spec.format for spec in specs} == {BFLOAT16, DENSE if precision == "fp32" else SPLIT}
    assert sum(spec.stored_bytes for spec in specs) == 2 * PUBLISHED_PARAMETERS + 4 * ADAPTERS
    streamed = sum(program.stage_stream_bytes(stage) for stage in program.stages)
    assert streamed == 2 * PUBLISHED_PARAMETERS + (4 if precision == "fp32" else 2) * ADAPTERS
    on_flash = FlashLayout.of(program, ROLES, 2, BLOCK_ELEMENTS).file_bytes
    versions = 3 * 12 * ADAPTERS  # places of what is trained: weight and two moments
    assert on_flash == pytest.approx(2 * PUBLISHED_PARAMETERS + versions, rel=1e-3)
    before = program_of(source, precision, is_narrow=False)
    assert sum(w.stored_bytes for w in before.weights.values()) == 4 * before.parameters


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoint_of_a_70b_model_is_little_more_than_its_adapters(source, precision):
    program = program_of(source, precision, is_narrow=True)
    frozen = source.shapes().keys() - source.adapter_weights
    saved = checkpoint_bytes(program, roles_of(program), frozen)
    own = 12 * sum(math.prod(source.shapes()[name]) for name in source.adapter_weights)
    assert own == 12 * ADAPTERS <= saved < 1.1 * own
    whole = checkpoint_bytes(program, roles_of(program))
    assert whole == pytest.approx(2 * PUBLISHED_PARAMETERS + saved, rel=1e-5)
