"""Masked training on a tokenizer that uses all of its ids."""

import argparse
import inspect
from pathlib import Path

import pytest

from penstock import Trainer
from penstock.config import load, resolve_preset
from penstock.errors import DataError

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "bert-large.yaml"
SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}


def settings(folder, tokenizer, vocabulary):
    text = folder / "text.txt"
    text.write_text(inspect.getsource(argparse))
    return {
        "model": {"preset": "bert-base", **SIZES, "vocab_size": vocabulary},
        "data": {"input": [str(text)], "tokenizer": tokenizer, "sequence_length": 32},
        "batch": {"size": 4},
        "engine": {"threads": 1, "device": "cpu"},
        "run": {"dir": str(folder / "run"), "steps": 1},
        "evaluation": {"every": None},
        "checkpoint": {"every": None},
    }


def test_tokenizer_without_a_spare_id_is_refused_before_the_build(tmp_path):
    with pytest.raises(DataError) as caught:
        Trainer(settings(tmp_path, "train-bpe:300", 300))
    assert str(caught.value) == (
        "data.tokenizer: expected fewer ids than the vocabulary of 300 of bert-base, got "
        "300 of train-bpe:300; masked training needs an id that the text never has: set "
        "data.tokenizer to train-bpe:299, or the model's vocab_size to 301 or more"
    )
    with pytest.raises(DataError, match=r"got 257 of bytes; .* vocab_size to 258 or more$"):
        Trainer(settings(tmp_path, "bytes", 257))
    assert not (tmp_path / "run" / "data").exists()
    with pytest.raises(DataError, match=r"never has: set the model's vocab_size to 258 or more$"):
        Trainer(settings(tmp_path, "train-bpe:257", 257))


def test_one_spare_id_is_the_mask(tmp_path):
    trainer = Trainer(settings(tmp_path, "train-bpe:299", 300))
    assert trainer._data.dataset.vocab_size == 299  # the text fills the vocabulary
    assert trainer._data.training.mask_token_id == 299
    trainer.train()
    trainer.close()


def test_recipe_of_bert_leaves_an_id_for_the_mask():
    config = load(RECIPE)
    vocabulary = resolve_preset(config.model.preset, config.model.overrides).config["vocab_size"]
    assert config.data.tokenizer == f"train-bpe:{vocabulary - 1}"
