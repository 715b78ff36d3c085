"""Model sources: what is exported computes what the plain model computes, under the same names."""

import json
import re
import sys

import pytest
import torch
from families import FAMILIES, fields, plain_builder
from grids import quick_first, thinned
from torch import nn
from torch.nn import functional as F

from penstock.errors import CompileError, ConfigError
from penstock.models import InputSpec, ModelSource

BATCH, TOKENS = 2, 24


class Mlp(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 3))
        self.body[0].bias.requires_grad_(False)
        self.frequencies = torch.arange(8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x * self.frequencies)


class TokenModel(nn.Module):
    """A language model of the user's own: logits, no `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 12)
        self.head = nn.Linear(12, 50)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(input_ids).cumsum(1))


class TwoTokens(TokenModel):
    """Predicts the next two tokens, as ProphetNet; only the first prediction is returned."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids).cumsum(1)
        return self.head(torch.stack([x, x.flip(-1)], 1))[:, 0]


def make_mlp(width: int = 16) -> nn.Module:
    return Mlp(width)


def squared_error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, y)


def export(source: ModelSource, batch: int = BATCH, tokens: int = TOKENS):
    example = source.example_inputs(batch, tokens)
    return torch.export.export(source.module, (), example, strict=False)


def run(source: ModelSource, program, inputs: dict[str, torch.Tensor], seed: int = 0):
    """Run an exported program on the source's own initial weights and buffers."""
    values = {
        **dict(source.initial_weights(seed)),
        **source.with_buffer_seed(seed).buffers.values(),
    }
    signature = program.graph_signature
    feeds = []
    for spec in signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            feeds.append(inputs[spec.arg.name])
        else:
            feeds.append(values[source.public_name(spec.target)])
    return torch.fx.Interpreter(program.graph_module).run(*feeds)[0]


def batch_for(source: ModelSource, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, TOKENS)
    ids = torch.randint(0, source.vocab_size, shape, generator=generator)
    labels = torch.randint(0, source.vocab_size, shape, generator=generator)
    labels[0, :5] = -100
    inputs = {"input_ids": ids, "labels": labels}
    if "attention_mask" in source.inputs:
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.int64)
        inputs["attention_mask"][1, -4:] = 0
    return inputs


@pytest.mark.parametrize(("family", "seed"), thinned([*FAMILIES], [0, 3]))
def test_exported_loss_equals_the_plain_model(family: str, seed: int) -> None:
    source = ModelSource.from_hf_config(fields(family))
    inputs = batch_for(source, seed)
    got = run(source, export(source), inputs, seed)

    torch.manual_seed(seed)
    model = plain_builder(family)().train()
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "family", quick_first(["gpt2", "opt", "llama", "qwen3"], ["gpt2", "llama"])
)
def test_causal_attention_needs_no_mask(family: str) -> None:
    tokens = 23  # a size that nothing else has
    graph = export(ModelSource.from_hf_config(fields(family)), tokens=tokens).graph
    attention = [n for n in graph.nodes if "scaled_dot_product_attention" in str(n.target)]
    assert len(attention) == 2
    for node in attention:
        _, _, _, mask, _, is_causal = node.args
        assert mask is None
        assert is_causal is True
    squares = [
        n
        for n in graph.nodes
        if isinstance(n.meta.get("val"), torch.Tensor) and n.meta["val"].shape[-2:] == (tokens,) * 2
    ]
    assert squares == []


@pytest.mark.parametrize("tokens", [8, 40])
def test_sliding_window_is_kept_if_shorter_than_the_sequence(tokens: int) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    settings = {**FAMILIES["llama"], "sliding_window": 16, "model_type": "mistral"}
    source = ModelSource.from_hf_config(settings)
    program = export(source, tokens=tokens)
    ids = torch.randint(0, 320, (BATCH, tokens), generator=torch.Generator().manual_seed(0))
    got = run(source, program, {"input_ids": ids, "labels": ids})
    del settings["model_type"]
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**settings, attn_implementation="eager"))
    expected = F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten(), reduction="sum")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", quick_first(FAMILIES, ["gpt2", "bert"]))
def test_names_equal_the_state_dict(family: str) -> None:
    source = ModelSource.from_hf_config(fields(family))
    plain = plain_builder(family)()
    shapes = {name: tuple(p.shape) for name, p in plain.named_parameters()}
    assert source.shapes() == shapes
    assert {name for name, _ in source.initial_weights(0)} == set(shapes)
    assert source.parameter_count() == plain.num_parameters()
    assert source.trainable == set(shapes)
    assert {*shapes, *source.aliases, *source.buffers.values()} >= set(plain.state_dict())
    exported = export(source).graph_signature.parameters
    assert {source.public_name(name) for name in exported} == set(shapes)


def test_loss_and_head_are_adjacent_in_the_graph() -> None:
    nodes = list(export(ModelSource.from_preset("tiny")).graph.nodes)
    tail = [str(node.target) for node in nodes[-5:]]
    assert tail == [
        "aten.linear.default",
        "aten.view.default",
        "aten.view.default",
        "aten.cross_entropy_loss.default",
        "output",
    ]


def test_logits_need_no_labels() -> None:
    source = ModelSource.from_preset("tiny")
    example = source.example_inputs(BATCH, TOKENS)
    for name in source.targets:
        del example[name]
    program = torch.export.export(source.logits_module.eval(), (), example, strict=False)
    [output] = program.graph.find_nodes(op="output")[0].args[0]
    assert output.meta["val"].shape == (BATCH, TOKENS, source.vocab_size)


def test_config_files_and_folders_are_accepted(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**fields("llama"), "dtype": "bfloat16"}))
    for given in (tmp_path, path, str(path)):
        source = ModelSource.from_hf_config(given, {"num_hidden_layers": 1})
        assert source.hf_config.num_hidden_layers == 1
        assert {tensor.dtype for _, tensor in source.initial_weights(0)} == {torch.float32}


def test_bad_configs_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        ModelSource.from_hf_config(tmp_path / "none.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="as a Hugging Face config"):
        ModelSource.from_hf_config(tmp_path)
    with pytest.raises(ConfigError, match="has no model_type"):
        ModelSource.from_hf_config({"n_layer": 2})
    with pytest.raises(ConfigError, match=r"no model_type 'lama' \(did you mean 'llama'\?\)"):
        ModelSource.from_hf_config({"model_type": "lama"})
    with pytest.raises(ConfigError, match=r"gpt2 has no field 'n_layr' \(did you mean 'n_layer'"):
        ModelSource.from_hf_config({"model_type": "gpt2"}, {"n_layr": 2})
    with pytest.raises(ConfigError, match="has no masked_lm model for gpt2"):
        ModelSource.from_hf_config({"model_type": "gpt2"}, task="masked_lm")


def test_built_module_is_used_unchanged() -> None:
    torch.manual_seed(1)
    model = Mlp().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = ModelSource.from_module(
        model,
        loss=squared_error,
        inputs={"x": torch.zeros(1, 8)},
        targets={"y": InputSpec((3,))},
    )
    program = export(source, batch=5)
    weights = dict(source.initial_weights(seed=123))
    for name, parameter in model.named_parameters():
        assert weights[name].data_ptr() == parameter.data_ptr()
    assert source.trainable == set(weights) - {"body.0.bias"}
    x, y = torch.randn(5, 8), torch.randn(5, 3)
    torch.testing.assert_close(
        run(source, program, {"x": x, "y": y}), F.mse_loss(model(x), y), rtol=1e-6, atol=1e-6
    )
    assert not model.training
    assert type(model.body[0].weight) is nn.Parameter
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_a_built_transformers_model_keeps_its_ties() -> None:
    torch.manual_seed(5)
    model = plain_builder("gpt2")()
    source = ModelSource.from_module(model)
    assert source.task == "causal_lm"
    assert source.aliases == {"lm_head.weight": "transformer.wte.weight"}
    inputs = batch_for(source, 0)
    got = run(source, export(source), inputs)
    logits = model(inputs["input_ids"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_custom_language_model_is_accepted() -> None:
    source = ModelSource.from_factory(f"{__name__}:TokenModel", task="causal_lm", vocab_size=50)
    inputs = batch_for(source, 2)
    got = run(source, export(source), inputs, seed=9)
    torch.manual_seed(9)
    logits = TokenModel()(inputs["input_ids"])
    expected = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(got, expected)


def test_logits_may_be_a_part_of_what_the_model_computes() -> None:
    source = ModelSource.from_factory(f"{__name__}:TwoTokens", task="causal_lm", vocab_size=50)
    inputs = batch_for(source, 2)
    got = run(source, export(source), inputs, seed=9)
    torch.manual_seed(9)
    logits = TwoTokens()(inputs["input_ids"])
    expected = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(got, expected)


def test_factory_in_the_current_folder_is_found(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, width):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(width, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x).square().mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = ModelSource.from_factory("my_net:Net", {"width": 4}, inputs={"x": InputSpec((4,))})
    assert source.loss_reduction == "mean"
    assert source.shapes() == {"layer.weight": (1, 4), "layer.bias": (1,)}
    x = torch.ones(3, 4)
    weights = dict(source.initial_weights(2))
    expected = F.linear(x, weights["layer.weight"], weights["layer.bias"]).square().mean()
    torch.testing.assert_close(run(source, export(source, batch=3), {"x": x}, 2), expected)


def test_bad_factories_are_refused() -> None:
    here = __name__
    with pytest.raises(ConfigError, match=r"expected package.module:function, got 'make'"):
        ModelSource.from_factory("make")
    with pytest.raises(ConfigError, match="cannot import no_such_module"):
        ModelSource.from_factory("no_such_module:make")
    with pytest.raises(ConfigError, match=r"has no 'make_mpl' \(did you mean 'make_mlp'\?\)"):
        ModelSource.from_factory(f"{here}:make_mpl")
    with pytest.raises(ConfigError, match=r"does not take these args: .*wdth"):
        ModelSource.from_factory(f"{here}:make_mlp", {"wdth": 3})
    with pytest.raises(CompileError, match="make_mlp failed to build a model: RuntimeError: "):
        ModelSource.from_factory(f"{here}:make_mlp", {"width": -3})


def test_a_loss_that_is_not_a_scalar_is_refused() -> None:
    source = ModelSource.from_module(Mlp(), inputs={"x": InputSpec((8,))})
    message = re.escape("expected a scalar loss from Mlp, got (2, 3); give loss: package.module")
    with pytest.raises(CompileError, match=message):
        export(source)


def test_too_long_sequence_is_refused() -> None:
    source = ModelSource.from_preset("tiny")
    message = r"^tiny takes sequences of at most 256 tokens, sequence_length is 257; lower it"
    with pytest.raises(ConfigError, match=message):
        source.example_inputs(1, 257)


def test_gpt3_175b_is_described_without_memory() -> None:
    source = ModelSource.from_preset("gpt3-175b")
    assert source.shapes()["transformer.h.95.mlp.c_fc.weight"] == (12288, 49152)
    assert source.buffers.values() == {}
