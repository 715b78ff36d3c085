"""Weights of a Hugging Face folder: those that `transformers` loads, or an error with names."""

import json
import shlex

import pytest
import torch
from hf_folders import auto_class, model_of, rewrite, save, set_config
from safetensors.torch import load_file, save_file

from penstock.errors import ConfigError, CorruptionError
from penstock.models import ModelSource, WeightFiles

FORMS = [
    ("gpt2", torch.float32, None),
    ("gpt2", torch.float16, "10KB"),
    ("llama", torch.bfloat16, "10KB"),
    ("llama-tied", torch.float32, "20KB"),
    ("qwen3", torch.float16, None),
    ("bert", torch.bfloat16, "10KB"),
]


def loaded(folder, family):
    model = auto_class(family).from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(found, expected):
    found = dict(found)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize(("family", "dtype", "shard"), FORMS)
def test_weights_equal_those_loaded_by_transformers(family, dtype, shard, tmp_path):
    save(model_of(family, dtype=dtype), tmp_path, shard)
    source = ModelSource.from_hf(tmp_path)
    assert_same(source.initial_weights(seed=0), loaded(tmp_path, family))


def test_weights_are_returned_in_the_requested_order(tmp_path):
    save(model_of("llama"), tmp_path, "10KB")
    source = ModelSource.from_hf(tmp_path)
    names = sorted(source.shapes(), reverse=True)
    assert [name for name, _ in source.initial_weights(0, names)] == names


@pytest.mark.parametrize("family", ["gpt2", "llama-tied"])
def test_base_model_names_without_prefix_are_accepted(family, tmp_path):
    model = model_of(family)
    save(model.base_model, tmp_path)
    assert_same(ModelSource.from_hf(tmp_path).initial_weights(0), dict(model.named_parameters()))


def test_old_names_and_extra_tensors_of_old_files_are_accepted(tmp_path):
    model = model_of("bert")
    save(model, tmp_path)

    def old(tensors):
        named = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ): tensor
            for name, tensor in tensors.items()
        }
        assert named.keys() != tensors.keys()
        named["bert.embeddings.position_ids"] = torch.arange(64)[None]
        named["bert.pooler.dense.weight"] = torch.ones(32, 32)
        named["cls.seq_relationship.bias"] = torch.ones(2)
        return named

    rewrite(tmp_path, old)
    assert_same(ModelSource.from_hf(tmp_path).initial_weights(0), loaded(tmp_path, "bert"))


def test_buffers_that_are_now_computed_are_ignored(tmp_path):
    save(model_of("gpt2"), tmp_path / "gpt2")
    save(model_of("llama"), tmp_path / "llama")

    def causal(tensors):
        for layer in range(2):
            tensors[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).bool()
            tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    def rotary(tensors):
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(tmp_path / "gpt2", causal)
    rewrite(tmp_path / "llama", rotary)
    for family in ("gpt2", "llama"):
        source = ModelSource.from_hf(tmp_path / family)
        assert_same(source.initial_weights(0), loaded(tmp_path / family, family))


def test_tied_weight_is_read_by_any_of_its_names(tmp_path):
    model = model_of("gpt2")
    wte = model.transformer.wte.weight.detach().clone()
    save(model, tmp_path)
    expected = dict(model.named_parameters())
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": wte}))
    assert_same(ModelSource.from_hf(tmp_path).initial_weights(0), expected)
    rewrite(tmp_path, lambda t: {n: v for n, v in t.items() if not n.endswith("wte.weight")})
    assert_same(ModelSource.from_hf(tmp_path).initial_weights(0), expected)
    rewrite(tmp_path, lambda t: t.update({"transformer.wte.weight": wte + 1}))
    with pytest.raises(ConfigError) as caught:
        dict(ModelSource.from_hf(tmp_path).initial_weights(0))
    assert str(caught.value) == (
        f"{tmp_path}: transformer.wte.weight and lm_head.weight are one weight in GPT2LMHeadModel, "
        "but have different values in the files; set tie_word_embeddings to false in config.json "
        "if they are two weights"
    )
    set_config(tmp_path, tie_word_embeddings=False)
    found = dict(ModelSource.from_hf(tmp_path).initial_weights(0))
    assert torch.equal(found["lm_head.weight"], wte)
    assert torch.equal(found["transformer.wte.weight"], wte + 1)


def test_weights_merged_by_transformers_are_merged(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=50, **sizes, **heads))
    save(model, tmp_path, "4KB")
    assert any("experts.2.w3" in name for name in WeightFiles(tmp_path).tensors)
    assert_same(ModelSource.from_hf(tmp_path).initial_weights(0), dict(model.named_parameters()))


def test_missing_weights_are_counted_and_named(tmp_path):
    save(model_of("bert"), tmp_path)
    rewrite(tmp_path, lambda t: {n: v for n, v in t.items() if "layer.1.attention" not in n})
    with pytest.raises(ConfigError) as caught:
        ModelSource.from_hf(tmp_path)
    prefix = "bert.encoder.layer.1.attention"
    assert str(caught.value) == (
        f"{tmp_path}: 10 weights ({prefix}.self.query.weight, {prefix}.self.query.bias, "
        f"{prefix}.self.key.weight, {prefix}.self.key.bias, {prefix}.self.value.weight ...) of "
        "BertForMaskedLM not in its files; download the folder again, or save the complete model"
    )


def test_surplus_tensors_are_named_with_the_ignore_line(tmp_path):
    save(model_of("llama"), tmp_path)
    rewrite(tmp_path, lambda t: t.update({"score.weight": torch.ones(2, 32)}))
    with pytest.raises(ConfigError) as caught:
        ModelSource.from_hf(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: 1 tensor (score.weight) that LlamaForCausalLM does not have; to ignore them, "
        "set model.ignore: [score.weight]"
    )
    source = ModelSource.from_hf(tmp_path, ignore=["score.*"])
    assert "score.weight" not in dict(source.initial_weights(0))


def test_misspelt_weight_is_reported_as_missing_and_surplus(tmp_path):
    save(model_of("llama"), tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.norms.weight": t.pop("model.norm.weight")}))
    message = (
        r"1 weight \(model.norm.weight\) of LlamaForCausalLM not in its files \(did you mean "
        r"'model.norms.weight'\?\); 1 tensor \(model.norms.weight\) in its files are not used"
    )
    with pytest.raises(ConfigError, match=message):
        ModelSource.from_hf(tmp_path)


def test_another_shape_or_type_is_refused(tmp_path):
    save(model_of("llama"), tmp_path)
    set_config(tmp_path, intermediate_size=56)
    with pytest.raises(ConfigError) as caught:
        ModelSource.from_hf(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/model.safetensors: 'model.layers.0.mlp.down_proj.weight' is [32, 48], "
        "model.layers.0.mlp.down_proj.weight in the model is [32, 56]; config.json and weights are "
        "of different models"
    )
    set_config(tmp_path, intermediate_size=48)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}))
    with pytest.raises(ConfigError, match=r"'lm_head.weight' is stored as I8, expected one of F32"):
        ModelSource.from_hf(tmp_path)


def test_a_quantised_model_is_refused(tmp_path):
    set_config(save(model_of("llama"), tmp_path), quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match=r"this llama is quantised .* take the original"):
        ModelSource.from_hf(tmp_path)


def test_pickles_are_refused_with_a_command_that_converts_them(tmp_path):
    model = model_of("gpt2")
    save(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError) as caught:
        ModelSource.from_hf(tmp_path)
    message, command = str(caught.value).split("\n")
    assert message == (
        f"{tmp_path}: its weights are in pytorch_model.bin: pickles, which can run any code and "
        "are never read here; convert them where you trust them:"
    )
    python, option, code = shlex.split(command)
    assert (python, option) == ("python", "-c")
    exec(code, {})
    assert_same(ModelSource.from_hf(tmp_path).initial_weights(0), dict(model.named_parameters()))


def test_pickles_in_shards_have_a_command_too(tmp_path):
    model = model_of("llama")
    save(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    half = len(model.state_dict()) // 2
    weight_map = {}
    for number in (1, 2):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        part = dict(list(model.state_dict().items())[(number - 1) * half : number * half + number])
        torch.save(part, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ConfigError, match=r"weights are in .*00002.bin, .*00002.bin: pickles"
    ) as caught:
        ModelSource.from_hf(tmp_path)
    exec(shlex.split(str(caught.value))[-1], {})
    assert_same(ModelSource.from_hf(tmp_path).initial_weights(0), dict(model.named_parameters()))


def test_folder_without_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^no/such: no such folder; .* hf download no/such"):
        ModelSource.from_hf("no/such")
    with pytest.raises(ConfigError, match=r"no such folder; .* correct the path, or put a model"):
        ModelSource.from_hf(tmp_path / "nothere")
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"^expected a Hugging Face config\.json at "):
        ModelSource.from_hf(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        ModelSource.from_hf(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: expected a Hugging Face folder, got a run; `penstock export {tmp_path} OUT` "
        "writes its model to the folder OUT: give OUT instead"
    )
    save(model_of("gpt2"), tmp_path)
    with pytest.raises(ConfigError, match="expected the folder of a model, it is a file"):
        ModelSource.from_hf(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"expected model.safetensors or .*it holds config.json"):
        ModelSource.from_hf(tmp_path)


def test_folder_of_links_as_in_the_hub_cache_is_accepted(tmp_path):
    model = model_of("llama")
    save(model, tmp_path / "blobs", "20KB")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert_same(ModelSource.from_hf(snapshot).initial_weights(0), dict(model.named_parameters()))


def test_file_changed_while_reading_is_noticed(tmp_path):
    save(model_of("llama"), tmp_path)
    weights = ModelSource.from_hf(tmp_path).initial_weights(0)
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CorruptionError, match=r"as at the opening, got [\d,]+; do not change"):
        next(weights)


def test_fingerprint_depends_on_weights_not_files(tmp_path):
    fingerprints = {}
    for name, seed, shard in [("a", 0, None), ("b", 0, "10KB"), ("c", 1, None)]:
        save(model_of("llama", seed), tmp_path / name, shard)
        fingerprints[name] = ModelSource.from_hf(tmp_path / name).weights_fingerprint()
    assert fingerprints["a"] == fingerprints["b"] != fingerprints["c"]
    save_file(
        {
            n: t + (n == "lm_head.weight")
            for n, t in load_file(tmp_path / "a/model.safetensors").items()
        },
        tmp_path / "c" / "model.safetensors",
        {"format": "pt"},
    )
    assert ModelSource.from_hf(tmp_path / "c").weights_fingerprint() != fingerprints["a"]


def test_fields_of_the_configuration_can_be_changed(tmp_path):
    save(model_of("gpt2"), tmp_path)
    assert ModelSource.from_hf(tmp_path, {"attn_pdrop": 0.5}).hf_config.attn_pdrop == 0.5
    with pytest.raises(ConfigError, match=r"gpt2 has no field 'attn_drop' \(did you mean"):
        ModelSource.from_hf(tmp_path, {"attn_drop": 0.5})
    assert json.loads((tmp_path / "config.json").read_text())["attn_pdrop"] == 0.0
