"""A run keeps the model of the config.json that `model.hf_config` named at its start."""

import json

import pytest

from penstock import Trainer
from penstock.config import Config, check_run, load_run, write_record
from penstock.config.deciding_keys import trajectory
from penstock.errors import ConfigError
from penstock.training.export import export_run

FIELDS = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-05,
    "transformers_version": "5.0",
}


def settings(folder, steps=2, model=None):
    (folder / "text.txt").write_text("water flows over the weir. " * 100)
    return {
        "model": {"hf_config": str(folder / "config.json")} if model is None else model,
        "data": {"input": [str(folder / "text.txt")], "sequence_length": 8},
        "batch": {"size": 2, "micro": 2},
        "optimizer": {"schedule": {"name": "constant"}},
        "engine": {"threads": 1, "device": "cpu"},
        "evaluation": {"every": None},
        "run": {"dir": str(folder / "run"), "steps": steps},
    }


def write(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**FIELDS, **changes}))


def train(config):
    trainer = Trainer(config, quiet=True)
    try:
        return trainer.train()["steps"]
    finally:
        trainer.close()


def check(config):
    return check_run(Config.from_mapping(config), lambda folder: None)


@pytest.fixture
def run(tmp_path):
    write(tmp_path)
    assert train(settings(tmp_path)) == 2
    return tmp_path


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rms_norm_eps": 0.1}, "model.hf_config.rms_norm_eps: 1e-05 in the run, 0.1 now"),
        ({"hidden_act": "relu"}, 'model.hf_config.hidden_act: null in the run, "relu" now'),
        ({"num_attention_heads": 8, "num_key_value_heads": 8}, "_heads: 4 in the run, 8 now"),
    ],
)
def test_edited_file_is_refused_by_its_keys(run, change, line):
    write(run, **change)
    with pytest.raises(ConfigError) as checked:
        check(settings(run, 4))
    assert line in str(checked.value)
    with pytest.raises(ConfigError) as trained:
        train(settings(run, 4))
    assert str(trained.value) == str(checked.value)


def test_file_resumes_by_content_whatever_its_path_and_version(run):
    write(run, transformers_version="6.0", _name_or_path="a")
    (run / "model").mkdir()
    (run / "config.json").rename(run / "model" / "config.json")
    assert check(settings(run, 4, {"hf_config": str(run / "model")}))
    assert train(settings(run, 4, {"hf_config": str(run / "model")})) == 2
    assert train(settings(run, 5, {"hf_config": FIELDS})) == 1


def test_deleted_file_is_named_and_the_record_resumes(run):
    (run / "config.json").unlink()
    with pytest.raises(ConfigError) as caught:
        check(settings(run, 4))
    assert str(caught.value) == (
        f"model.hf_config: expected a config.json with a model_type at {run}/config.json, there is "
        "none that can be read; restore it, or resume with the run's own copy: penstock train "
        f"{run}/run/config.yaml"
    )
    assert train(load_run(run / "run", ["run.steps=3"])) == 1


def test_export_and_evaluation_use_the_model_of_the_run(run):
    write(run, rms_norm_eps=0.1)
    export_run(load_run(run / "run"), run / "out", "fp32", 1 << 30)
    assert json.loads((run / "out" / "config.json").read_text())["rms_norm_eps"] == 1e-05
    trainer = Trainer(load_run(run / "run"), quiet=True)
    assert trainer.model.hf_config.rms_norm_eps == 1e-05
    trainer.close()


def test_run_that_recorded_a_path_resumes(tmp_path, monkeypatch):
    write(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("penstock.config.model_file.read_model_file", lambda place: None)
        assert train(settings(tmp_path)) == 2
    before = settings(tmp_path, 3)
    assert load_run(tmp_path / "run").model.hf_config == str(tmp_path / "config.json")
    assert check(before)
    (tmp_path / "other.json").write_text(json.dumps({**FIELDS, "rms_norm_eps": 0.1}))
    other = {**before, "model": {"hf_config": str(tmp_path / "other.json")}}
    with pytest.raises(ConfigError, match=r"rms_norm_eps: 1e-05 in the run, 0\.1 now"):
        train(other)
    assert train(before) == 1
    assert trajectory(load_run(tmp_path / "run"))["model.hf_config.hidden_size"] == 16


def test_run_that_recorded_a_path_of_a_deleted_file_resumes(tmp_path):
    config = Config.from_mapping(settings(tmp_path))
    write_record(config)
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json").write_text("{}")
    assert check(settings(tmp_path, model={"hf_config": FIELDS}))
