"""Models that an earlier process has recorded: when they are recalled, and that they are equal."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.config import Config
from penstock.errors import CompileError
from penstock.models import ModelSource
from penstock.planning import builders, model_sources
from penstock.planning.program_cache import entries, remembered

SMALL = {"preset": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
MODELS: dict[str, Any] = {
    "preset": SMALL,
    "buffers": {"hf_config": LLAMA},
    "masked": {"hf_config": BERT},
}

compile_source = getattr(builders.compile_source, "__wrapped__", builders.compile_source)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Make this process look as one that has not imported `transformers`, with an empty cache;
    return the folder of the models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loaded = {name: module for name, module in sys.modules.items() if name != "transformers"}
    monkeypatch.setattr(remembered, "sys", SimpleNamespace(modules=loaded))
    return tmp_path / "cache" / "penstock" / "models"


def model_of(spec: Any, **options: Any) -> ModelSource:
    config = Config.from_mapping({"model": spec, **options})
    return model_sources.source_of(config, None, False, lambda text: None)


def is_recalled(source: ModelSource) -> bool:
    return not source.structure.is_recorded


@pytest.mark.parametrize("name", MODELS)
def test_recalled_model_answers_as_the_recorded_one(name):
    recorded, found = model_of(MODELS[name]), model_of(MODELS[name])
    assert is_recalled(found)
    assert not is_recalled(recorded)
    for field in ("name", "task", "max_sequence_length", "vocab_size", "aliases", "bfloat16"):
        assert getattr(found, field) == getattr(recorded, field), field
    for field in ("trainable", "inputs", "targets", "loss_reduction", "key", "buffer_seed"):
        assert getattr(found, field) == getattr(recorded, field), field
    for method in ("parameter_count", "trained_count", "buffer_bytes", "embeddings_and_head"):
        assert getattr(found, method)() == getattr(recorded, method)(), method
    assert list(found.shapes().items()) == list(recorded.shapes().items())
    assert found.fields() == recorded.fields()
    assert found.structure.class_name == recorded.structure.class_name
    for number in ("hidden_size", "num_attention_heads"):
        assert found.structure.number(number) == recorded.structure.number(number) > 0
    assert found.input_specs(2, 8) == recorded.input_specs(2, 8)
    assert repr(found) == repr(recorded)
    assert is_recalled(found)


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_buffers_of_a_recalled_model_have_the_same_bits(name):
    recorded, found = model_of(MODELS[name]), model_of(MODELS[name])
    for seed in (0, 7):
        expected = dict(recorded.initial_weights(seed))
        weights = dict(found.initial_weights(seed))
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[each], expected[each]) for each in expected)
    assert found.buffers.are_random == recorded.buffers.are_random
    values, wanted = found.buffers.values(), recorded.buffers.values()
    assert values.keys() == wanted.keys()
    assert all(torch.equal(values[each], wanted[each]) for each in wanted)
    assert is_recalled(found)


@pytest.mark.parametrize("name", MODELS)
def test_modules_are_recorded_when_they_are_needed(name):
    recorded, found = model_of(MODELS[name]), model_of(MODELS[name])
    assert found.hf_config.to_dict() == recorded.hf_config.to_dict()
    assert not is_recalled(found)
    assert type(found.module) is type(recorded.module)
    assert found.module.model is found.logits_module.model is found.original
    tensors = found.origin.names.parameters.values()
    assert {id(each) for each in tensors} == {id(each) for each in found.original.parameters()}
    assert found.buffers.persistent().keys() == recorded.buffers.persistent().keys()


@pytest.mark.parametrize("goal", ["train", "evaluate", "logits"])
@pytest.mark.parametrize("name", MODELS)
def test_program_of_a_recalled_model_is_read(name, goal, monkeypatch):
    options: dict[str, Any] = {
        "micro_batch": 2,
        "length": 8,
        "precision": "fp32",
        "products": "torch",
        "goal": goal,
    }
    compiled = compile_source(model_of(MODELS[name]), **options)

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a program is compiled that is in the cache")

    monkeypatch.setattr(builders, "compile_module", refuse)
    found = model_of(MODELS[name])
    assert compile_source(found, **options).graph_digest == compiled.graph_digest
    assert is_recalled(found)
    with pytest.raises(AssertionError, match="is compiled"):  # what was not asked for before
        compile_source(found, **{**options, "length": 7})
    assert not is_recalled(found)


def test_adapters_of_a_recalled_model_are_those_of_the_recorded_one():
    lora = {"rank": 2, "targets": ["*.c_fc.weight"]}
    plain = model_of(SMALL, lora=lora)
    found = model_of(SMALL, lora=lora)
    assert found.adapters == plain.adapters
    assert found.key is None  # a key is that of a model without adapters
    expected = dict(plain.initial_weights(3))
    weights = dict(found.initial_weights(3))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[each], expected[each]) for each in expected)


def test_other_configurations_are_other_models(tmp_path):
    assert not is_recalled(model_of(SMALL))
    assert not is_recalled(model_of({**SMALL, "n_layer": 1}))
    assert is_recalled(model_of({**SMALL, "n_layer": 1}))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert not is_recalled(model_of({"hf_config": str(path)}))
    assert is_recalled(model_of({"hf_config": str(path)}))
    path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    changed = model_of({"hf_config": str(path)})
    assert not is_recalled(changed)
    assert changed.parameter_count() < model_of({"hf_config": LLAMA}).parameter_count()


@pytest.mark.parametrize("changed", ["code", "library", "torch", "damage", "imported"])
def test_what_determines_a_model_is_checked(folder, monkeypatch, changed):
    assert not is_recalled(model_of(SMALL))
    assert is_recalled(model_of(SMALL))
    if changed == "code":
        monkeypatch.setattr(remembered, "code_digest", lambda: "another version")
    elif changed == "library":
        monkeypatch.setattr(remembered, "file_digest", lambda path: "edited")
    elif changed == "torch":
        forward = torch.nn.LayerNorm.forward
        own = types.FunctionType(forward.__code__, {**forward.__globals__, "__name__": "somebody"})
        monkeypatch.setattr(torch.nn.LayerNorm, "forward", own)
    elif changed == "damage":
        for path in folder.iterdir():
            path.write_bytes(path.read_bytes()[:-1])
    else:
        monkeypatch.setattr(remembered, "sys", sys)
    assert not is_recalled(model_of(SMALL))


@pytest.mark.parametrize("owner", [torch.nn.init, torch.Tensor, torch.nn.functional], ids=str)
def test_process_with_replaced_functions_of_pytorch_neither_writes_nor_reads(
    owner, folder, monkeypatch
):
    name = "gelu" if owner is torch.nn.functional else "normal_"
    original = getattr(owner, name)
    with monkeypatch.context() as replaced:
        replaced.setattr(owner, name, lambda *a, **k: original(*a, **k))
        assert model_of(SMALL).key is None
        assert not folder.exists()
    assert model_of(SMALL).key is not None
    with monkeypatch.context() as replaced:
        replaced.setattr(owner, name, lambda *a, **k: original(*a, **k))
        assert not is_recalled(model_of(SMALL))
    assert is_recalled(model_of(SMALL))


def test_every_imported_file_of_the_library_is_checked(folder):
    key = model_of(SMALL).key
    assert key is not None
    content = entries.read_entry(key.digest, "models")
    assert content is not None
    files = json.loads(bytes(content[8 : 8 + int.from_bytes(content[:8], "little")]))["files"]
    wanted = ("initialization.py", "configuration_utils.py", "modeling_utils.py")
    models = ("models/gpt2/modeling_gpt2.py", "models/gpt2/configuration_gpt2.py")
    assert {*wanted, *models} <= {*files}
    assert len({*files.values()}) > len(files) / 2  # each has its own digest, but for equal files


def test_library_that_was_imported_since_is_recorded(monkeypatch):
    """What has been replaced in it meanwhile counts."""
    compiled = compile_source(model_of(SMALL), micro_batch=1, length=8, precision="fp32")
    found = model_of(SMALL)
    monkeypatch.setattr(remembered, "sys", sys)
    again = compile_source(found, micro_batch=1, length=8, precision="fp32")
    assert not is_recalled(found)
    assert again.graph_digest == compiled.graph_digest


@pytest.mark.parametrize("change", ["edited", "removed"])
def test_file_that_changes_after_the_model_was_recalled_changes_no_model(change, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    recorded = model_of({"hf_config": str(path)})
    found = model_of({"hf_config": str(path)})
    assert is_recalled(found)
    if change == "edited":
        path.write_text(json.dumps({**LLAMA, "num_hidden_layers": 1, "rms_norm_eps": 0.5}))
    else:
        path.unlink()
    assert found.hf_config.to_dict() == recorded.hf_config.to_dict()
    assert not is_recalled(found)
    assert len(list(found.original.parameters())) == len(found.shapes())


def test_model_that_is_recorded_as_another_one_is_refused(monkeypatch):
    from transformers.models.gpt2 import modeling_gpt2

    model_of(SMALL)
    found = model_of(SMALL)
    original = modeling_gpt2.GPT2MLP.__init__

    def wider(self: Any, size: int, config: Any) -> None:
        original(self, size + 1, config)

    monkeypatch.setattr(modeling_gpt2.GPT2MLP, "__init__", wider)
    with pytest.raises(CompileError, match="builds another model now than when this process"):
        found.module  # noqa: B018


def test_program_of_a_changed_library_is_not_kept_for_recalled_models(folder, monkeypatch):
    from transformers.models.gpt2 import modeling_gpt2

    source = model_of(SMALL)
    before = set(folder.iterdir())
    original = modeling_gpt2.GPT2MLP.forward
    changed = types.FunctionType(
        original.__code__, {**original.__globals__, "__name__": "somebody"}
    )
    monkeypatch.setattr(modeling_gpt2.GPT2MLP, "forward", changed)
    compile_source(source, micro_batch=1, length=8, precision="fp32")
    assert set(folder.iterdir()) == before
    assert not remembered.is_as_remembered(source)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no JSON",
        *(
            len(text).to_bytes(8, "little") + text
            for text in (b"{}", b"[]", b'{"files": {}, "classes": {}, "model": "{}"}')
        ),
    ],
)
def test_entry_of_another_form_is_removed(folder, content):
    key = model_of(SMALL).key
    assert key is not None
    entries.write_entry(key.digest, content, "models")
    assert not is_recalled(model_of(SMALL))
    assert is_recalled(model_of(SMALL))  # it was written anew


def test_recipe_that_cannot_be_read_is_made_again(folder):
    recorded = model_of(SMALL)
    assert recorded.key is not None
    content = entries.read_entry(recorded.key.digest, "models")
    assert content is not None
    end = 8 + int.from_bytes(content[:8], "little")
    entries.write_entry(recorded.key.digest, bytes(content[:end]) + b"another", "models")
    found = model_of(SMALL)
    assert is_recalled(found)
    expected = dict(recorded.initial_weights(1))
    assert all(torch.equal(value, expected[name]) for name, value in found.initial_weights(1))
    assert not is_recalled(found)
    assert not is_recalled(model_of(SMALL))  # its entry was removed


def test_model_of_the_users_code_is_not_remembered(folder, tmp_path, monkeypatch):
    code = "from torch import nn\n\ndef build():\n    return nn.Linear(3, 1)\n"
    (tmp_path / "own_code.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = model_of({"factory": "own_code:build"})
    assert source.key is None
    assert not folder.exists()


RUN = """
import json, sys
import numpy as np
import penstock
from penstock.data import ArraySource
rows = np.random.default_rng(0).integers(0, 40, (8, 9))
source = ArraySource({"input_ids": rows[:, :-1], "labels": rows[:, 1:]})
config = {
    "model": {"preset": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40},
    "data": {"sequence_length": 8},
    "batch": {"size": 4},
    "run": {"dir": sys.argv[1], "steps": 2},
}
trainer = penstock.Trainer(config, source=source, held_out=source, quiet=True)
loss = trainer.evaluate(1)["loss"]
trainer.train()
print(json.dumps([loss, trainer.store.content_hash()]))
print(json.dumps(sorted(name for name in sys.modules if name.count(".") < 3)))
"""


def test_second_run_imports_no_library_that_models_or_traces(tmp_path):
    said = []
    for number in range(2):
        command = [sys.executable, "-c", RUN, str(tmp_path / f"run{number}")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        said.append([json.loads(line) for line in done.stdout.splitlines()])
    (first, imported), (second, again) = said
    assert first == second
    heavy = {
        "penstock.compiler.build",
        "penstock.models.recording",
        "sympy",
        "torch._dynamo",
        "torch._inductor",
        "transformers",
    }
    assert heavy <= {*imported}
    assert heavy & {*again} <= {"penstock.compiler.build"}  # which `builders` would call
