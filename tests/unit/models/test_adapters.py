"""Adapters as a transformation of any model source: names, initial values, stages, refusals."""

import numpy as np
import pytest
import scipy.stats
import torch
from tiny_models import FIELDS, LENGTH, language_model
from torch import nn

from penstock.errors import ConfigError
from penstock.models import InputSpec, ModelSource
from penstock.planning.builders import compile_source


class TwoLayers(nn.Module):
    """A model of the user's own, with a layer that is no Linear and weights that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.tied = nn.Linear(8, 6)
        self.tied.weight = self.second.weight
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        return (self.second(hidden) + self.tied(hidden)).square().mean()


INPUTS = {"x": InputSpec((6,))}


def build_two_layers() -> nn.Module:
    return TwoLayers()


def sources():
    """One source of each kind, and a target in it."""
    gpt2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
    return {
        "preset": (ModelSource.from_preset("tiny", gpt2), "*.c_attn.weight"),
        "hf_config": (
            ModelSource.from_hf_config({"model_type": "llama", **FIELDS["llama"]}),
            "*.q_proj.weight",
        ),
        "factory": (
            ModelSource.from_factory(f"{__name__}:build_two_layers", inputs=INPUTS),
            "first.weight",
        ),
        "module": (ModelSource.from_module(TwoLayers(), inputs=INPUTS), "first.weight"),
    }


@pytest.mark.parametrize("kind", ["preset", "hf_config", "factory", "module"])
def test_every_source_accepts_adapters_and_is_unchanged(kind):
    source, target = sources()[kind]
    before, start = source.shapes(), dict(source.initial_weights(3))
    adapted = source.with_adapters(rank=2, alpha=2.0, targets=[target])
    assert source.shapes() == before
    assert adapted.structure.class_name == source.structure.class_name
    assert adapted.aliases == source.aliases
    shapes = adapted.shapes()
    assert {n: s for n, s in shapes.items() if n not in adapted.adapter_weights} == before
    assert len(adapted.adapters) == (1 if kind in ("factory", "module") else 2)
    for name, adapter in adapted.adapters.items():
        path = name.removesuffix(".weight")
        rows, columns = (
            before[name][::-1] if kind == "preset" else before[name]
        )  # Conv1D: [in, out]
        assert (adapter.down, adapter.up) == (f"{path}.lora_A.weight", f"{path}.lora_B.weight")
        assert (shapes[adapter.down], shapes[adapter.up]) == ((2, columns), (rows, 2))
    weights = dict(adapted.initial_weights(3))
    assert weights.keys() == shapes.keys()
    assert all(torch.equal(weights[name], value) for name, value in start.items())
    assert adapted.buffers.values().keys() == source.buffers.values().keys()


def test_model_of_one_layer_accepts_adapters():
    source = ModelSource.from_module(nn.Linear(6, 1), inputs=INPUTS)
    adapted = source.with_adapters(rank=2, alpha=2.0, targets=["weight"])
    assert adapted.adapters["weight"].path == ""
    assert set(adapted.shapes()) == {"weight", "bias", "lora_A.weight", "lora_B.weight"}
    assert adapted.shapes()["lora_A.weight"] == (2, 6)


def test_initial_a_is_uniform_and_b_zero_by_seed_and_name():
    source, _ = sources()["hf_config"]
    wide = source.with_adapters(rank=32, alpha=1.0, targets=["*_proj.weight"])
    narrow = source.with_adapters(rank=32, alpha=5.0, targets=["*.v_proj.weight"])
    weights = dict(wide.initial_weights(7, wide.adapter_weights))
    assert weights.keys() == wide.adapter_weights
    for name, weight in weights.items():
        if name.endswith("lora_B.weight"):
            assert not weight.any()
            continue
        bound = 1 / np.sqrt(weight.shape[1])  # Kaiming with a = sqrt(5)
        fit = scipy.stats.kstest(weight.flatten().numpy(), "uniform", args=(-bound, 2 * bound))
        assert fit.pvalue > 1e-4, name
    downs = [w for n, w in weights.items() if n.endswith("q_proj.lora_A.weight")]
    assert len(downs) == 2
    assert not torch.equal(*downs)
    again = dict(narrow.initial_weights(7, narrow.adapter_weights))
    assert all(torch.equal(weights[name], value) for name, value in again.items())
    other = dict(narrow.initial_weights(8, narrow.adapter_weights))
    name = "model.layers.0.self_attn.v_proj.lora_A.weight"
    assert not torch.equal(other[name], again[name])


@pytest.mark.long
def test_adapters_keep_kinds_and_stages():
    source = language_model("llama", num_hidden_layers=3).source(0)
    adapted = source.with_adapters(rank=2, alpha=4.0, targets=["*_proj.weight"], dropout=0.1)
    ours = compile_source(
        adapted, micro_batch=2, length=LENGTH, precision="fp32", with_buffers=False
    )
    blocks = [f"model.layers.{number}" for number in range(3)]
    assert [stage.name for stage in ours.stages] == ["embed", *blocks, "head"]
    kinds = [stage.kind.name for stage in ours.stages[1:-1]]
    # Nothing that trains lies before the first block, so that nothing is sent back from it.
    assert len(set(kinds)) == 2
    assert len(set(kinds[1:])) == 1
    assert {n for n, w in ours.weights.items() if w.trainable} == adapted.adapter_weights


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "*.c_atn.weight",
            "lora.targets: pattern '*.c_atn.weight' matches no weight (did you mean "
            "'*.c_attn.weight'?); the model's weights are named like transformer.wte.weight, "
            "transformer.wpe.weight, transformer.h.0.ln_1.weight, transformer.h.0.ln_1.bias, "
            "transformer.h.0.attn.c_attn.weight and 24 more",
        ),
        (
            "*.attn.c_attn.*",
            "lora.targets: pattern '*.attn.c_attn.*' matches transformer.h.0.attn.c_attn.bias "
            "(Conv1D.bias); adapters go on weights of Linear and Conv1D layers, such as "
            "transformer.h.0.attn.c_attn.weight",
        ),
        (
            "*.wpe.weight",
            "lora.targets: pattern '*.wpe.weight' matches transformer.wpe.weight "
            "(Embedding.weight); adapters go on weights of Linear and Conv1D layers, such as "
            "transformer.h.0.attn.c_attn.weight",
        ),
        (
            "lm_head.weight",
            "lora.targets: pattern 'lm_head.weight' matches lm_head.weight, which is tied to "
            "transformer.wte.weight: merging an adapter into one of them would change the other; "
            "exclude it",
        ),
    ],
)
def test_weight_without_adapter_support_is_refused_by_name(target, message):
    source = language_model("gpt2").source(0)
    with pytest.raises(ConfigError) as caught:
        source.with_adapters(rank=2, alpha=2.0, targets=[target])
    assert str(caught.value) == message


def test_second_adapters_and_name_conflicts_are_refused():
    source, target = sources()["module"]
    adapted = source.with_adapters(rank=2, alpha=2.0, targets=[target])
    with pytest.raises(ConfigError, match="TwoLayers has adapters already; give lora once"):
        adapted.with_adapters(rank=2, alpha=2.0, targets=[target])
    model = TwoLayers()
    model.first.lora_A = nn.Identity()
    taken = ModelSource.from_module(model, inputs=INPUTS)
    with pytest.raises(ConfigError, match=r"first\.weight, whose layer has a lora_A or lora_B"):
        taken.with_adapters(rank=2, alpha=2.0, targets=[target])
