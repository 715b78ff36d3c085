"""What a file and the command line mean together."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from penstock.config import (
    ByteSize,
    Config,
    FactoryModel,
    HuggingFaceConfigModel,
    PresetModel,
    commented,
    load,
)

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def from_text(tmp_path, text, overrides=()):
    path = tmp_path / "name.yaml"
    path.write_text(text)
    return load(path, overrides)


@pytest.mark.parametrize("written", ["1e-4", "1E-4", "0.0001", "1.0e-4", "100e-6"])
def test_a_number_in_any_spelling_is_a_number(tmp_path, written):
    config = from_text(tmp_path, f"model: gpt2\noptimizer: {{learning_rate: {written}}}\n")
    assert config.optimizer.learning_rate == 0.0001
    again = from_text(tmp_path, "model: gpt2\n", [f"optimizer.learning_rate={written}"])
    assert again.optimizer.learning_rate == 0.0001


def test_yaml_1_1_booleans_and_times_stay_strings(tmp_path):
    config = from_text(tmp_path, "model: gpt2\nfreeze: [no, on, 1:30, '3']\n")
    assert config.freeze == ("no", "on", "1:30", "3")


def test_overrides_set_nested_keys_lists_and_missing_sections(tmp_path):
    config = from_text(
        tmp_path,
        "model: gpt2\noptimizer: {weight_decay: 0.5}\n",
        [
            "optimizer.learning_rate=3e-4",
            "optimizer.betas=[0.8, 0.9]",
            "engines=4",
            "data.input=texts/a.txt",
            "engine.memory=2GiB",
            "run.dir=elsewhere",
            "optimizer.clip_norm=null",
        ],
    )
    assert config.optimizer.learning_rate == 3e-4
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.optimizer.weight_decay == 0.5
    assert config.optimizer.clip_norm is None
    assert config.engines == 4
    assert config.data.input == ("texts/a.txt",)
    assert config.engine.memory == 2 * 1024**3
    assert isinstance(config.engine.memory, ByteSize)
    assert config.run.dir == Path("elsewhere")


def test_one_input_needs_no_brackets(tmp_path):
    config = from_text(tmp_path, "model: gpt2\ndata: {input: texts/*.txt}\n")
    assert config == from_text(tmp_path, 'model: gpt2\ndata: {input: ["texts/*.txt"]}\n')


def test_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "model: gpt2\nrun: {dir: ~/run}\ndata: {input: ~/texts/*.txt}\n"
    config = from_text(tmp_path, text, ["store.flash.path=~/flash"])
    assert config.run.dir == tmp_path / "run"
    assert config.store.flash.path == tmp_path / "flash"
    assert config.data.input == (f"{tmp_path}/texts/*.txt",)
    assert from_text(tmp_path, "model: gpt2\nrun: {dir: a~/b}\n").run.dir == Path("a~/b")


def test_a_presets_number_can_be_changed_from_the_command_line(tmp_path):
    config = from_text(tmp_path, "model: gpt2\n", ["model.n_layer=6", "model.n_embd=384"])
    assert config.model == PresetModel.model_validate(
        {"preset": "gpt2", "n_layer": 6, "n_embd": 384}
    )


def test_the_three_forms_of_a_model(tmp_path):
    assert from_text(tmp_path, "model: gpt2\n").model == PresetModel(preset="gpt2")
    assert from_text(tmp_path, "model: {hf_config: a/config.json}\n").model == (
        HuggingFaceConfigModel(hf_config="a/config.json")
    )
    own = from_text(tmp_path, "model: {factory: 'a.b:c', args: {width: 3}, loss: 'a.b:d'}\n").model
    assert own == FactoryModel(factory="a.b:c", args={"width": 3}, loss="a.b:d")


def test_run_folder_is_named_after_the_file(tmp_path):
    assert from_text(tmp_path, "model: gpt2\n").run.dir == Path("runs/name")
    assert from_text(tmp_path, "model: gpt2\nrun: {steps: 5}\n").run.dir == Path("runs/name")
    assert from_text(tmp_path, "model: gpt2\nrun: {dir: here}\n").run.dir == Path("here")
    assert from_text(tmp_path, "model: gpt2\n", ["run.dir=there"]).run.dir == Path("there")


def test_lion_has_its_own_default_betas_and_sgd_has_none(tmp_path):
    assert from_text(tmp_path, "model: gpt2\n").optimizer.betas == (0.9, 0.95)
    assert from_text(tmp_path, "model: gpt2\noptimizer: {name: lion}\n").optimizer.betas == (
        0.9,
        0.99,
    )
    given = "model: gpt2\noptimizer: {name: lion, betas: [0.5, 0.6]}\n"
    assert from_text(tmp_path, given).optimizer.betas == (0.5, 0.6)


def test_sgd_has_no_weight_decay_by_default(tmp_path):
    def decay(optimizer):
        return from_text(tmp_path, f"model: gpt2\noptimizer: {optimizer}\n").optimizer.weight_decay

    assert decay("{name: sgd}") == 0.0
    assert decay("{name: sgd, weight_decay: 0.1}") == 0.1
    assert (decay("{name: adamw}"), decay("{name: lion}")) == (0.1, 0.1)
    assert from_text(tmp_path, "model: gpt2\n", ["optimizer.name=sgd"]).optimizer.weight_decay == 0


def test_gradient_precision_defaults_to_the_run_precision():
    assert Config().gradient_precision == "fp32"
    assert Config(precision="bf16").gradient_precision == "bf16"
    mixed = Config.from_mapping({"precision": "bf16", "store": {"gradients": "fp32"}})
    assert mixed.gradient_precision == "fp32"


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError):
        Config().engines = 2


def full_configuration():
    return Config.from_mapping(
        {
            "model": {"preset": "gpt2", "n_layer": 3},
            "data": {"input": ["a b/*.txt", "c: d"], "tokenizer": "train-bpe:1000"},
            "batch": {"size": 12, "micro": 4},
            "precision": "bf16",
            "optimizer": {
                "name": "sgd",
                "learning_rate": 1.5e-7,
                "momentum": 0.8,
                "nesterov": True,
                "clip_norm": None,
                "groups": [{"match": ["*.bias", "ln_*"], "weight_decay": 0}],
                "schedule": {"name": "piecewise", "boundaries": [3, 9], "ratios": [0.5, 0.1]},
            },
            "freeze": ["*.wte.*"],
            "train": ["*.ln_*"],
            "lora": {"rank": 4, "alpha": 8, "targets": ["*.c_attn.weight"], "dropout": 0.05},
            "engine": {"memory": "1536MiB", "device": "cpu", "recompute": "always"},
            "evaluation": {"every": 10, "early_stop_patience": 2},
        }
    )


@pytest.mark.parametrize("config", [Config(), Config(model="gpt2"), full_configuration()])
@pytest.mark.parametrize("write", [Config.dump_yaml, commented])
def test_written_configuration_round_trips(config, write):
    again = Config.from_mapping(yaml_mapping(write(config)))
    assert again == config


def yaml_mapping(text):
    from penstock.config.document import parse

    return parse(text, "text")[0]


def test_starter_has_every_key_with_its_explanation():
    lines = commented(Config(model="gpt2")).splitlines()
    assert max(map(len, lines)) <= 100
    keys = [number for number, line in enumerate(lines) if line.split("#")[0].strip()]
    assert len(keys) == count_keys(Config(model="gpt2").to_mapping())
    for number in keys:
        assert lines[number - 1].lstrip().startswith("#"), lines[number]


def count_keys(mapping):
    return sum(
        1 + (count_keys(value) if isinstance(value, dict) and value else 0)
        for value in mapping.values()
    )


def test_any_yaml_reader_reads_what_is_written():
    assert yaml.safe_load(Config(model="gpt2").dump_yaml())["engine"]["memory"] == "auto"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid(path):
    config = load(path)
    assert config.data.input or config.data.path


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_small_recipes_run_from_a_checkout_with_nothing_else(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load(f"recipes/{name}.yaml", training=True).run.steps <= 50


def test_reference_page_matches_the_code():
    from penstock.config.reference import markdown

    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == markdown(), "run: python -m penstock.config.reference > docs/configuration.md"
