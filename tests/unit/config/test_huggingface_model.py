"""`model: {hf: FOLDER}` in a configuration: its form, its tokenizer, and what decides a run."""

import pytest

from penstock.config import Config, HuggingFaceModel, load, trajectory
from penstock.errors import ConfigError


def config(**model) -> Config:
    return Config.from_mapping({"model": {"hf": "some/folder", **model}})


def test_keys_beside_the_folder_change_its_configuration():
    model = config(attn_pdrop=0.1, ignore=["score.*"]).model
    assert model == HuggingFaceModel(
        hf="some/folder", ignore=("score.*",), overrides={"attn_pdrop": 0.1}
    )


def test_huggingface_model_round_trips(tmp_path):
    whole = config(attn_pdrop=0.1, ignore=["score.*"])
    (tmp_path / "run.yaml").write_text(whole.dump_yaml())
    assert load(tmp_path / "run.yaml") == whole
    assert "  hf: some/folder\n  ignore:\n  - score.*\n  attn_pdrop: 0.1\n" in whole.dump_yaml()


def test_path_does_not_decide_the_result_and_other_keys_do():
    one, other = config(), Config.from_mapping({"model": {"hf": "elsewhere"}})
    assert trajectory(one) == trajectory(other)
    assert trajectory(one) != trajectory(config(attn_pdrop=0.1))
    assert trajectory(one) != trajectory(Config.from_mapping({"model": "tiny"}))


@pytest.mark.parametrize(
    ("model", "tokenizer", "expected"),
    [
        ({"hf": "some/folder"}, None, "some/folder"),
        ({"hf": "some/folder"}, "bytes", "bytes"),
        ("tiny", None, "bytes"),
        ("tiny", "train-bpe:300", "train-bpe:300"),
    ],
)
def test_tokenizer_of_a_checkpoint_is_the_default(model, tokenizer, expected):
    data = {} if tokenizer is None else {"tokenizer": tokenizer}
    assert Config.from_mapping({"model": model, "data": data}).tokenizer == expected


@pytest.mark.parametrize(
    ("folder", "advice"),
    [
        ("/none", "correct the path, or put a model of the hub there: hf download NAME"),
        ("../none", "correct the path, or put a model of the hub there: hf download NAME"),
        ("none/such", "for a model of the hub: hf download none/such"),
    ],
)
def test_missing_folder_is_named_before_loading(tmp_path, folder, advice):
    (tmp_path / "text.txt").write_text("text")
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{hf: {folder}}}\ndata: {{input: [{tmp_path}/text.txt]}}\n")
    with pytest.raises(ConfigError) as caught:
        load(path, training=True)
    assert str(caught.value) == (
        f"{path}:1: model.hf: expected a folder on this machine, {folder} does not exist; "
        f"{advice} --local-dir FOLDER"
    )


def test_folder_must_be_a_string():
    with pytest.raises(ConfigError, match=r"model\.hf: expected a text, got 3"):
        Config.from_mapping({"model": {"hf": 3}})
