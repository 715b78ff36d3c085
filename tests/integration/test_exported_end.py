"""An exported model ends its text in transformers where its documents ended in training."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from grids import quick_first
from hf_folders import set_config
from tiny_models import FIELDS

from penstock import Trainer
from penstock.data import build_dataset
from penstock.training import prune_model

DOCUMENT = 'she said "stop" and went\n'  # with id 2, a quotation mark
SIZE = 280
SHAPE = {"vocab_size": SIZE, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
         "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "llama": {"hf_config": {"model_type": "llama", "intermediate_size": 64, **SHAPE}},
    "mistral": {"hf_config": {"model_type": "mistral", "intermediate_size": 64,
                              "num_key_value_heads": 2, **SHAPE}},
    "opt": {"hf_config": {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32,
                          "dropout": 0.0, **SHAPE}},
    "llama preset": {"preset": "tinyllama-1.1b", "intermediate_size": 64,
                     "num_key_value_heads": 2, **SHAPE},
    "gpt2 preset": {"preset": "tiny", **SHAPE},
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A data set of one short document again and again, with a tokenizer trained on it."""
    folder = tmp_path_factory.mktemp("made")
    with (folder / "text.jsonl").open("w") as file:
        for _ in range(400):
            file.write(json.dumps({"text": DOCUMENT}) + "\n")
    build_dataset([folder / "text.jsonl"], f"train-bpe:{SIZE}", folder / "set")
    return folder


def settings(made, run, model, steps=60, **data):
    return {
        "model": model,
        "data": {"path": str(made / "set"), "sequence_length": 32, **data},
        "batch": {"size": 8},
        "optimizer": {"learning_rate": 1e-2, "schedule": {"name": "constant"}},
        "engine": {"threads": 1},
        "run": {"dir": str(run), "steps": steps},
        "evaluation": {"every": None},
        "checkpoint": {"every": None},
    }


def continued(folder):
    """Return what transformers writes after the begin of a document, with its default settings."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("she", return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0].tolist()
    return ids, tokenizer


@pytest.mark.parametrize("name", quick_first(MODELS, ["llama", "gpt2 preset"]))
def test_generate_of_transformers_stops_at_the_end_of_a_document(name, made, tmp_path):
    trainer = Trainer(settings(made, tmp_path / "run", MODELS[name]), quiet=True)
    trainer.train()
    trainer.export(tmp_path / "out")
    end = trainer._data.dataset.end_of_document
    ids, tokenizer = continued(tmp_path / "out")
    assert 2 in ids
    assert ids[-1] == end == tokenizer.eos_token_id == 0
    assert tokenizer.decode(ids[:-1]) == DOCUMENT
    assert "".join(trainer.generate("she", temperature=0.0)) == DOCUMENT.removeprefix("she")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == (end, end)


@pytest.fixture(scope="module")
def pretrained(made):
    """A Llama folder with a tokenizer and generation settings of its own, which end at id 2."""
    folder = made / "hf"
    config = transformers.AutoConfig.for_model("llama", **{**FIELDS["llama"], "vocab_size": SIZE})
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    set_config(folder, eos_token_id=[2, 3], bos_token_id=1)
    own = {"eos_token_id": [2, 3], "bos_token_id": 1, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(own))
    (made / "other.txt").write_text("quick zebras jump over many lazy foxes\n" * 50)
    build_dataset([made / "other.txt"], f"train-bpe:{SIZE}", made / "by-own")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(made / "by-own" / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def exported(made, model, folder, **data):
    """Return the end and the begin in the exported configuration, and the generation settings."""
    trainer = Trainer(settings(made, folder / "run", model, steps=1, **data), quiet=True)
    trainer.train()
    trainer.export(folder / "out")
    found = [
        json.loads((folder / "out" / name).read_text())
        for name in ("config.json", "generation_config.json")
    ]
    return (found[0]["eos_token_id"], found[0]["bos_token_id"]), found[1]


def test_generation_settings_of_a_folder_get_the_end_of_another_tokenizer(
    made, pretrained, tmp_path
):
    model = {"hf": str(pretrained)}
    ends, generation = exported(made, model, tmp_path, tokenizer=f"train-bpe:{SIZE}")
    assert ends == (0, 0)
    assert generation == {"eos_token_id": 0, "bos_token_id": 0, "max_new_tokens": 7}


def test_folder_with_its_own_tokenizer_keeps_its_ends(made, pretrained, tmp_path):
    build_dataset([made / "text.jsonl"], str(pretrained), tmp_path / "set")
    ends, generation = exported(tmp_path, {"hf": str(pretrained)}, tmp_path)
    assert ends == ([2, 3], 1)
    assert generation == {"eos_token_id": [2, 3], "bos_token_id": 1, "max_new_tokens": 7}
    prune_model(pretrained, tmp_path / "pruned", 0.5)
    pruned = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert (pruned["eos_token_id"], pruned["bos_token_id"]) == ([2, 3], 1)
