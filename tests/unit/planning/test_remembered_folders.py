"""Models of Hugging Face folders that an earlier process has recorded: when they are recalled, and
that their values are those of the folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_folders import FAMILIES, model_of, rewrite, save, set_config
from safetensors.torch import load_file, save_file

from penstock.config import Config
from penstock.errors import ConfigError, CorruptionError
from penstock.models import KEPT, ModelSource, buffer_files, keep_small_files
from penstock.planning import builders, model_sources
from penstock.planning.program_cache import remembered

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 3,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
GEMMA = {
    "pad_token_id": None,
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}

compile_source = getattr(builders.compile_source, "__wrapped__", builders.compile_source)


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch) -> Path:
    """Make this process look as one that has not imported `transformers`, with an empty cache;
    return the folder of the remembered models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = {name: module for name, module in sys.modules.items() if name != "transformers"}
    monkeypatch.setattr(remembered, "sys", SimpleNamespace(modules=loaded))
    return tmp_path / "cache" / "penstock" / "models"


def model(folder: Path, **options: Any) -> ModelSource:
    config = Config.from_mapping({"model": {"hf": str(folder), **options}})
    return model_sources.source_of(config, None, False, lambda text: None)


def resumed(folder: Path, run: Path) -> ModelSource:
    """Return the model of a folder as a resumed run has it."""
    config = Config.from_mapping({"model": {"hf": str(folder)}, "run": {"dir": str(run)}})
    return model_sources.source_of(config, None, True, lambda text: None)


def keep(folder: Path, run: Path, buffers: Mapping[str, torch.Tensor]) -> None:
    """Keep what a run keeps of a folder."""
    run.mkdir()
    keep_small_files(folder, run / KEPT, buffer_files(buffers))


def is_recalled(source: ModelSource) -> bool:
    return not source.structure.is_recorded


def assert_same(found: Any, expected: Any) -> None:
    found, expected = dict(found), dict(expected)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def saved(family: str, folder: Path) -> Path:
    """Save a model: the files of `mixtral` hold its experts apart, those of `gemma4_text` hold
    buffers whose values are not those of a new model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    fields = SIZES if family == "mixtral" else {**SIZES, **GEMMA}
    config = AutoConfig.for_model(family, **fields)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, buffer in made.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(0.5)
    return save(made, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_recalled_model_of_a_folder_answers_as_the_recorded_one(family, dtype, tmp_path):
    folder = save(model_of(family, dtype=dtype), tmp_path / "hf", "10KB")
    recorded, found = model(folder), model(folder)
    assert is_recalled(found)
    assert not is_recalled(recorded)
    for field in ("name", "task", "aliases", "bfloat16", "trainable", "inputs", "key", "notes"):
        assert getattr(found, field) == getattr(recorded, field), field
    for field in ("folder", "config_file", "weights_folder", "folder_weights", "from_library"):
        assert getattr(found, field) == getattr(recorded, field), field
    for method in ("shapes", "fields", "buffer_bytes", "embeddings_and_head"):
        assert getattr(found, method)() == getattr(recorded, method)(), method
    for method in ("weights_fingerprint", "trained_count", "values_fingerprint"):
        assert getattr(found, method)() == getattr(recorded, method)(), method
    assert len(found.bfloat16) == (len(found.shapes()) if dtype == torch.bfloat16 else 0)
    assert_same(found.initial_weights(1), recorded.initial_weights(1))
    assert_same(found.buffers.values(), recorded.buffers.values())
    assert is_recalled(found)
    assert found.hf_config.to_dict() == recorded.hf_config.to_dict()
    assert found.module.model is found.original
    assert found.buffers.persistent().keys() == recorded.buffers.persistent().keys()


def test_recalled_model_has_the_values_of_its_own_folder(tmp_path):
    one = save(model_of("llama"), tmp_path / "one")
    other = save(model_of("llama", seed=5), tmp_path / "other", "10KB")
    model(one)
    expected = model_of("llama", seed=5).named_parameters()
    found = model(other)  # in other files, too
    assert is_recalled(found)
    assert found.folder == other
    assert_same(found.initial_weights(0), expected)
    rewrite(one, lambda tensors: {name: value + 1 for name, value in tensors.items()})
    values = load_file(one / "model.safetensors")
    found = model(one)
    assert is_recalled(found)
    assert_same(found.initial_weights(0, sorted(values)), sorted(values.items()))


def test_what_determines_the_model_of_a_folder_is_checked(tmp_path):
    folder = save(model_of("llama"), tmp_path / "hf")
    assert not is_recalled(model(folder))
    assert is_recalled(model(folder))
    assert not is_recalled(model(folder, hidden_act="gelu"))
    assert not is_recalled(model(folder, ignore=["extra.*"]))
    with pytest.raises(ConfigError, match="LlamaForCausalLM does not have"):
        model(folder, num_hidden_layers=1)
    rewrite(folder, lambda tensors: {name: value.half() for name, value in tensors.items()})
    assert not is_recalled(model(folder))
    assert is_recalled(model(folder))
    rewrite(folder, lambda tensors: {**tensors, "extra.weight": torch.ones(1)})
    with pytest.raises(ConfigError, match="does not have"):
        model(folder)
    assert is_recalled(model(save(model_of("llama"), tmp_path / "again")))
    set_config(folder, rms_norm_eps=0.5)
    assert not is_recalled(model(folder, ignore=["extra.*"]))


@pytest.mark.parametrize("changed", ["library", "damage", "imported"])
def test_entries_of_a_folder_are_checked(changed, models, tmp_path, monkeypatch):
    folder = save(model_of("llama"), tmp_path / "hf")
    model(folder)
    assert len(list(models.iterdir())) == 2
    if changed == "library":
        monkeypatch.setattr(remembered, "file_digest", lambda path: "edited")
    elif changed == "damage":
        smallest = min(models.iterdir(), key=lambda path: path.stat().st_size)
        smallest.write_bytes(smallest.read_bytes()[:-1])
    else:
        monkeypatch.setattr(remembered, "sys", sys)
    assert not is_recalled(model(folder))
    if changed != "imported":
        assert is_recalled(model(folder))


def test_first_resume_recalls_the_model_that_the_first_start_recorded(tmp_path):
    folder, run = save(model_of("llama"), tmp_path / "hf"), tmp_path / "run"
    keep(folder, run, {})
    recorded, found = model(folder), resumed(folder, run)
    assert is_recalled(found)
    assert found.weights_folder is None
    assert found.folder == run / KEPT
    assert found.key == recorded.key  # so that programs are those of the first start
    assert found.shapes() == recorded.shapes()
    compiled = compile_source(recorded, micro_batch=2, length=8, precision="fp32")
    again = compile_source(found, micro_batch=2, length=8, precision="fp32")
    assert again.graph_digest == compiled.graph_digest
    assert is_recalled(found)


def test_buffers_of_a_folder_are_those_of_the_recorded_model(tmp_path):
    folder, run = saved("gemma4_text", tmp_path / "hf"), tmp_path / "run"
    recorded = model(folder)
    stored = recorded.buffers.stored()
    assert stored
    keep(folder, run, stored)
    for found in (model(folder), resumed(folder, run)):
        assert is_recalled(found)
        assert_same(found.buffers.stored(), stored)
        assert_same(found.buffers.values(), recorded.buffers.values())
        assert found.fields() == recorded.fields()
        assert is_recalled(found)


def test_model_whose_weights_the_library_computes_is_recorded_to_read_them(tmp_path):
    folder, run = saved("mixtral", tmp_path / "hf"), tmp_path / "run"
    keep(folder, run, {})
    recorded = model(folder)
    again = model(folder)
    assert not is_recalled(again)
    assert_same(again.initial_weights(0), recorded.initial_weights(0))
    assert is_recalled(resumed(folder, run))  # which reads no weight of the folder


def test_folder_with_a_notice_gives_it_at_every_start(tmp_path):
    folder = saved("gemma4_text", tmp_path / "hf")
    rewrite(folder, lambda ts: {n: t for n, t in ts.items() if "layer_scalar" not in n})
    for _ in range(2):
        assert "the values of a new model are used" in model(folder).notes[0]


def test_model_whose_values_hide_that_it_sees_later_tokens_is_not_remembered(models, tmp_path):
    """Another folder of its configuration is refused."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**SIZES, "use_bidirectional_attention": True, "pad_token_id": None}
    config = AutoConfig.for_model("gemma3_text", **fields)
    torch.manual_seed(2)
    folder = save(AutoModelForCausalLM.from_config(config), tmp_path / "hf")
    with pytest.raises(ConfigError, match="expected a causal language model"):
        model(folder)
    seen = load_file(folder / "model.safetensors")
    rewrite(folder, lambda ts: {n: t * 0 if "o_proj" in n else t for n, t in ts.items()})
    assert model(folder).task == "causal_lm"
    assert not models.exists()
    rewrite(folder, lambda ts: seen)
    with pytest.raises(ConfigError, match="expected a causal language model"):
        model(folder)


def test_errors_of_a_folder_are_the_same_at_a_second_start(tmp_path):
    folder = save(model_of("llama-tied"), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    model(folder)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    model(folder)
    save_file(
        {**tensors, "lm_head.weight": head + 1}, folder / "model.safetensors", {"format": "pt"}
    )
    found = model(folder)
    assert is_recalled(found)
    with pytest.raises(ConfigError, match="are one weight in LlamaForCausalLM, but have different"):
        dict(found.initial_weights(0))
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CorruptionError):
        model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"expected model\.safetensors"):
        model(folder)
    set_config(folder, model_type="lama")
    with pytest.raises(ConfigError, match="knows no model_type 'lama'"):
        model(folder)


def test_configuration_that_changes_after_the_model_was_recalled_changes_no_model(tmp_path):
    folder = save(model_of("llama"), tmp_path / "hf")
    recorded, found = model(folder), model(folder)
    set_config(folder, num_hidden_layers=1, rms_norm_eps=0.5)
    assert is_recalled(found)
    assert found.hf_config.to_dict() == recorded.hf_config.to_dict()
    assert len(list(found.original.parameters())) == len(found.shapes())
    assert_same(found.initial_weights(0), recorded.initial_weights(0))


def test_adapters_of_a_recalled_model_are_those_of_the_recorded_one(tmp_path):
    folder = save(model_of("llama", dtype=torch.bfloat16), tmp_path / "hf")
    model(folder)
    base = model(folder)
    assert is_recalled(base)
    lora: dict[str, Any] = {"rank": 2, "alpha": 4.0, "targets": ["*.q_proj.weight"]}
    found = base.with_adapters(**lora)
    plain = ModelSource.from_hf(folder).with_adapters(**lora)
    assert found.adapters == plain.adapters
    assert found.bfloat16 == plain.bfloat16
    assert found.folder_weights == plain.folder_weights
    assert_same(found.initial_weights(3), plain.initial_weights(3))
