"""The auxiliary loss of a mixture of experts is the one that `transformers` itself adds.

The reference is the loss of `transformers`, `model(input_ids, labels=...)`, outside of any graph.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from grids import quick_first
from plain_training import Recipe, assert_same_training, streamed, trainer_of
from tiny_models import IGNORED, Case, language_model
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.errors import CompileError
from penstock.models import ModelSource

SIZES = {
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "intermediate_size": 24, "head_dim": 8},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "olmoe": {"num_experts": 4, "intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "granitemoe": {"num_local_experts": 4, "intermediate_size": 24},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 24, "head_dim": 8},
}
RARE = ("qwen2_moe", "granitemoe", "gpt_oss")
COMMON = tuple(family for family in FAMILIES if family not in RARE)


def loss_of_transformers(model: Any, rows: Any) -> torch.Tensor:
    """The sum over labelled tokens, as `Case.loss` wants it, of the mean that the model returns."""
    labels = rows["labels"]
    output = model(rows["input_ids"], labels=labels, shift_labels=labels, use_cache=False)
    return output.loss * (labels != IGNORED).sum()


def experts(family: str, **changes: Any) -> Case:
    settings = {
        **SIZES,
        **FAMILIES[family],
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
        **changes,
    }
    return Case(
        family,
        lambda: AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **settings), dtype=torch.float32
        ),
        lambda seed: ModelSource.from_hf_config({"model_type": family, **settings}),
        loss_of_transformers,
        language_model("llama").arrays,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    [*quick_first(COMMON, ["mixtral"]), *(pytest.param(f, marks=pytest.mark.slow) for f in RARE)],
)
def test_training_with_auxiliary_loss_equals_transformers(family, tmp_path):
    case, recipe = experts(family), Recipe(steps=5)
    assert_same_training(streamed(case, recipe, tmp_path), case, recipe)


@pytest.mark.long
def test_loss_of_one_micro_batch_equals_transformers(tmp_path):
    case, recipe = experts("mixtral"), Recipe(steps=1, warmup_steps=0, micro=8)
    model = case.plain(recipe.seed)
    batch = case.data(recipe.seed).batch(0, range(8), 8)
    rows = {name: torch.from_numpy(value) for name, value in batch.items()}
    labels = rows["labels"]
    output = model(rows["input_ids"], labels=labels, shift_labels=labels, use_cache=False)
    assert streamed(case, recipe, tmp_path).losses == pytest.approx([output.loss.item()], rel=1e-6)
    assert 0.1 * output.aux_loss.item() > 0.1  # the test would notice that it lacks


@pytest.mark.long
def test_the_held_out_loss_has_the_auxiliary_loss_as_transformers_reports_it(tmp_path):
    case, recipe = experts("mixtral"), Recipe(micro=8)
    trainer, _ = trainer_of(case, recipe, tmp_path)
    found = trainer.evaluate(1)
    [rows] = case.data(recipe.seed + 1).evaluation_batches(8, 8)
    labels = torch.from_numpy(rows["labels"])
    model = case.plain(recipe.seed).eval()
    tokens = torch.from_numpy(rows["input_ids"])
    with torch.no_grad():
        output = model(tokens, labels=labels, shift_labels=labels, use_cache=False)
    assert found["loss"] == pytest.approx(float(output.loss), rel=1e-6)


def test_unsupported_auxiliary_loss_is_refused(tmp_path):
    fields = {"output_router_logits": True, "model_type": "llama", "hidden_size": 32}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96}
    case = replace(
        language_model("llama"),
        source=lambda seed: ModelSource.from_hf_config({**fields, **sizes}),
    )
    with pytest.raises(CompileError) as caught:
        trainer_of(case, Recipe(), tmp_path)
    assert str(caught.value) == (
        "output_router_logits is set, but LlamaForCausalLM of transformers has no auxiliary loss "
        "of its routers; set output_router_logits to false"
    )
