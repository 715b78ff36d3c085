"""A model in which a token sees later tokens is no causal language model."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from penstock.errors import ConfigError
from penstock.models import ModelSource, causality

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
BERT = {"model_type": "bert", "architectures": ["BertLMHeadModel"]}
DECODER = "set is_decoder: true in its configuration"
REFUSED = {
    "BertGenerationDecoder": ({"model_type": "bert-generation"}, DECODER),
    "BertLMHeadModel": (
        BERT,
        f"{DECODER}, or train the masked language model (architectures: [BertForMaskedLM])",
    ),
    "RobertaForCausalLM": (
        {"model_type": "roberta", "architectures": ["RobertaForCausalLM"]},
        f"{DECODER}, or train the masked language model (architectures: [RobertaForMaskedLM])",
    ),
    "XLNetLMHeadModel": (
        {
            "model_type": "xlnet",
            "architectures": ["XLNetLMHeadModel"],
            "d_head": 8,
            "d_inner": 48,
        },
        "take another architecture",
    ),
    "XLMWithLMHeadModel": (
        {"model_type": "xlm", "architectures": ["XLMWithLMHeadModel"]},
        "set causal: true in its configuration",
    ),
    "Gemma3ForCausalLM": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True, "head_dim": 8},
        "set use_bidirectional_attention: false in its configuration",
    ),
}


def refusal(name: str, advice: str) -> str:
    return (
        f"{name}: expected a causal language model, found one whose logits depend on later tokens, "
        f"so that it would copy its labels; {advice}"
    )


def fields_of(name: str) -> dict[str, object]:
    fields = {**SIZES, **REFUSED[name][0]}
    if name == "XLNetLMHeadModel":
        del fields["max_position_embeddings"]  # it has no limit
        del fields["intermediate_size"]
    return fields


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_large", [False, True])
def test_model_that_sees_later_tokens_is_refused(name, is_large, monkeypatch):
    if is_large:  # too large to be computed itself
        monkeypatch.setattr(causality, "MOST_VALUES", 200_000)
        fields = {**fields_of(name), "vocab_size": 8192}
    else:
        fields = fields_of(name)
    with pytest.raises(ConfigError) as caught:
        ModelSource.from_hf_config(fields)
    assert str(caught.value) == refusal(name, REFUSED[name][1])


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("BertGenerationDecoder", {"is_decoder": True}),
        ("BertLMHeadModel", {"is_decoder": True}),
        ("RobertaForCausalLM", {"is_decoder": True}),
        ("XLMWithLMHeadModel", {"causal": True}),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": False}),
    ],
)
def test_named_field_makes_the_model_causal(name, switch):
    assert ModelSource.from_hf_config({**fields_of(name), **switch}).task == "causal_lm"


def test_encoder_of_real_size_is_refused():
    with pytest.raises(ConfigError) as caught:
        ModelSource.from_hf_config(BERT)
    assert str(caught.value) == refusal("BertLMHeadModel", REFUSED["BertLMHeadModel"][1])


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mixtral", "bloom", "opt", "gemma2"])
def test_causal_model_of_real_size_is_computed_and_accepted(model_type, monkeypatch):
    found = []
    compute = causality._sees_later

    def computed(build, config):
        found.append(compute(build, config))
        return found[-1]

    monkeypatch.setattr(causality, "_sees_later", computed)
    assert ModelSource.from_hf_config({"model_type": model_type}).task == "causal_lm"
    assert found == [False]


def test_encoder_from_a_folder_or_from_python_is_refused(tmp_path):
    module = BertLMHeadModel(BertConfig(**SIZES))
    module.save_pretrained(tmp_path)
    expected = refusal("BertLMHeadModel", REFUSED["BertLMHeadModel"][1])
    for make in (lambda: ModelSource.from_hf(tmp_path), lambda: ModelSource.from_module(module)):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value) == expected


class Mean(nn.Module):
    """A language model of the user's own, whose tokens see the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 12), nn.Linear(12, 50)
        self.calls = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.table(input_ids)
        return self.head(hidden + hidden.mean(1, keepdim=True))


def test_own_module_that_sees_later_tokens_is_refused():
    module = Mean()
    for make in (
        lambda: ModelSource.from_module(module, task="causal_lm"),
        lambda: ModelSource.from_factory(f"{__name__}:Mean", task="causal_lm"),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value) == refusal(
            "Mean", "hide later tokens in its forward, or give a loss of your own with task: custom"
        )
    assert module.calls == 0


def test_check_changes_no_random_state_and_no_mode():
    torch.manual_seed(3)
    module = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50))
    module.transformer.h.eval()
    state = torch.get_rng_state()
    source = ModelSource.from_module(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert not source.module.model.transformer.h.training
    assert source.module.model.transformer.drop.training
