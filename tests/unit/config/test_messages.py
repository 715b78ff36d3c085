"""What a mistake in a configuration is answered with, to the letter."""

import pytest

from penstock.config import Config, load
from penstock.config.load import to_config
from penstock.config.problems import NAMES_ELSEWHERE
from penstock.errors import ConfigError

_KEYS = (
    "model, data, batch, precision, optimizer, freeze, train, lora, sparsity, memory, store, "
    "engine, engines, cluster, fabric, run, evaluation, checkpoint, logging"
)


def message(tmp_path, monkeypatch, text, overrides=(), training=False):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load("run.yaml", overrides, training=training)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model: gpt2\ndta: {path: x}\n",
            f"run.yaml:2: dta: unknown key (did you mean 'data'?); a configuration has {_KEYS}",
        ),
        (
            "model: gpt2\nengine:\n  device: cpu\n  memroy: 1GiB\n",
            "run.yaml:4: engine.memroy: unknown key (did you mean 'memory'?); engine has device, "
            "devices, memory, recompute, cuda_graphs, threads, mesh, cores, cycles",
        ),
        (
            "model: gpt2\noptimizer:\n  schedule:\n    warmup: 3\n",
            "run.yaml:4: optimizer.schedule.warmup: unknown key (did you mean 'warmup_steps'?); "
            "optimizer.schedule has name, warmup_steps, decay_steps, final_ratio, power, "
            "boundaries, ratios",
        ),
        (
            "model: gpt2\noptimizer:\n  groups:\n  - match: ['*']\n    weigth_decay: 0\n",
            "run.yaml:5: optimizer.groups[0].weigth_decay: unknown key (did you mean "
            "'weight_decay'?); optimizer.groups[0] has match, learning_rate_scale, weight_decay",
        ),
        (
            "model: gpt2\nprecision: bfloat16\nengine: {device: gpu}\n",
            "run.yaml:2: precision: expected one of fp32, bf16, got 'bfloat16' (did you mean "
            "'bf16'?)\nrun.yaml:3: engine.device: expected one of auto, cpu, cuda, wafer, got "
            "'gpu' (did you mean 'cuda'?)",
        ),
        (
            "model: gtp2\n",
            "run.yaml:1: model.preset: expected the name of a preset, got 'gtp2' "
            "(did you mean 'gpt2'?)",
        ),
        (
            "model: {presett: gpt2}\n",
            "run.yaml:1: model: expected one of preset, hf, hf_config, factory, got presett "
            "(did you mean 'preset'?); for example model: gpt2",
        ),
        (
            "model: {factory: 'net:build', arg: {}}\n",
            "run.yaml:1: model.arg: unknown key (did you mean 'args'?); model has factory, args, "
            "task, loss",
        ),
        (
            "model: {factory: net.build}\n",
            "run.yaml:1: model.factory: expected package.module:function, got 'net.build'; name "
            "the module that can be imported and the function in it",
        ),
        (
            "model: gpt2\noptimizer: {learning_rate: fast}\n",
            "run.yaml:2: optimizer.learning_rate: expected a number, got 'fast'; for example "
            "optimizer.learning_rate: 0.0003",
        ),
        (
            "model: gpt2\noptimizer: {learning_rate: -1}\n",
            "run.yaml:2: optimizer.learning_rate: expected a number above 0, got -1; for example "
            "optimizer.learning_rate: 0.0003",
        ),
        (
            "model: gpt2\noptimizer: {learning_rate: .nan}\n",
            "run.yaml:2: optimizer.learning_rate: expected a finite number, got .nan; for example "
            "optimizer.learning_rate: 0.0003",
        ),
        (
            "model:\n  preset: gpt2\n  dropout: .nan\n",
            "run.yaml:3: model.dropout: expected a number, got nan",
        ),
        (
            "model: gpt2\nrun: {steps: 10.5}\n",
            "run.yaml:2: run.steps: expected a whole number, got 10.5; for example "
            "run.steps: 1000 (steps)",
        ),
        (
            "model: gpt2\nrun: {steps: true}\n",
            "run.yaml:2: run.steps: expected a whole number, got true; for example "
            "run.steps: 1000 (steps)",
        ),
        (
            "model: gpt2\nrun: {steps: 0}\n",
            "run.yaml:2: run.steps: expected a number from 1 up, got 0; for example "
            "run.steps: 1000 (steps)",
        ),
        (
            "model: gpt2\nengines: 1025\n",
            "run.yaml:2: engines: expected a number up to 1024, got 1025; for example engines: 1",
        ),
        (
            "model: gpt2\nprecision: bf\n",
            "run.yaml:2: precision: expected one of fp32, bf16, got 'bf' (did you mean 'bf16'?)",
        ),
        (
            "model: gpt2\nengine: {memory: 4 GX}\n",
            "run.yaml:2: engine.memory: expected a size such as 4GiB, 512MiB or 2GB, or auto, got "
            "'4 GX'; 'GX' is not a unit: use KiB, MiB, GiB or TiB",
        ),
        (
            "model: gpt2\nfreeze: '*.bias'\n",
            "run.yaml:2: freeze: expected a list, got '*.bias'; for example freeze: ['*.wte.*']",
        ),
        (
            "model: gpt2\nrun: 3\n",
            "run.yaml:2: run: expected a mapping, got 3; it has the keys dir, steps, seed",
        ),
        (
            "model: gpt2\nbatch: {size: 32, micro: 5}\n",
            "run.yaml:2: batch.micro: expected a divisor of batch.size 32, got 5; the next lower "
            "divisor is 4",
        ),
        (
            "model: gpt2\nbatch: {size: 2}\nengines: 4\n",
            "run.yaml:3: engines: expected at most batch.size 2, got 4; each engine needs a "
            "sequence",
        ),
        (
            "model: gpt2\noptimizer:\n  name: sgd\n  betas: [0.5, 0.5]\n",
            "run.yaml:4: optimizer.betas: has no effect on sgd; remove it, or choose adamw or lion",
        ),
        (
            "model: gpt2\noptimizer:\n  schedule:\n    name: constant\n    final_ratio: 0\n",
            "run.yaml:5: optimizer.schedule.final_ratio: has no effect on the schedule constant; "
            "remove it, or choose linear or cosine or polynomial",
        ),
        (
            "model: gpt2\noptimizer:\n  schedule: {name: piecewise, boundaries: [5], ratios: []}\n",
            "run.yaml:3: optimizer.schedule.ratios: expected one ratio per boundary, got 0 for 1",
        ),
        (
            "model: gpt2\noptimizer: {schedule: {warmup_steps: 9, decay_steps: 9}}\n",
            "run.yaml:2: optimizer.schedule.warmup_steps: expected fewer than the 9 steps over "
            "which the rate decays, got 9; lower it or raise optimizer.schedule.decay_steps",
        ),
        (
            "model: gpt2\noptimizer: {schedule: {warmup_steps: 50}}\nrun: {steps: 50}\n",
            "run.yaml:2: optimizer.schedule.warmup_steps: expected fewer than the 50 steps over "
            "which the rate decays, got 50; lower it or raise run.steps",
        ),
        (
            "model: gpt2\nevaluation: {every: null, early_stop_patience: 3}\n",
            "run.yaml:2: evaluation.early_stop_patience: expected null without evaluations, "
            "got 3; set evaluation.every",
        ),
        (
            "model: gpt2\ndata: {tokenizer: train-bpe}\n",
            "run.yaml:2: data.tokenizer: expected train-bpe:SIZE with a vocabulary above 256, "
            "got 'train-bpe'; for example train-bpe:4096",
        ),
        (
            "model: gpt2\nlora: {rank: 8}\n",
            "run.yaml:2: lora.targets: expected at least one pattern with lora.rank, got none; "
            "for example lora.targets: ['*.q_proj.weight', '*.v_proj.weight'] (Llama) or "
            "['*.c_attn.weight'] (GPT-2)",
        ),
        (
            "model: gpt2\nlora:\n  targets: ['*.c_attn.weight']\n",
            "run.yaml:3: lora.targets: has no effect without adapters; set lora.rank, such as 8",
        ),
        (
            "model: gpt2\nlora: {rank: 0, targets: ['*']}\n",
            "run.yaml:2: lora.rank: expected a number from 1 up, got 0; for example lora.rank: 8",
        ),
        ("data: {path: x}\n", "run.yaml: model: missing; add for example `model: gpt2`"),
        ("", "run.yaml: model: missing; add for example `model: gpt2`"),
        (
            "model: gpt2\nrun: {steps: 3}\nrun: {steps: 4}\n",
            "run.yaml:3: not valid YAML: key 'run' is given twice, first on line 2; keep one",
        ),
        (
            "model: [gpt2\nrun: x\n",
            "run.yaml:2: not valid YAML: expected ',' or ']', but got ':'",
        ),
        (
            "just words\n",
            "run.yaml:1: expected keys and values such as `model: gpt2`, got 'just words'",
        ),
    ],
)
def test_one_mistake_gives_its_message(tmp_path, monkeypatch, text, expected):
    assert message(tmp_path, monkeypatch, text) == expected


def test_all_mistakes_are_reported_in_file_order(tmp_path, monkeypatch):
    text = "model: gpt2\nengine:\n  memory: big\nrun:\n  stepps: 3\nengines: two\n"
    assert message(tmp_path, monkeypatch, text, ["logging.every=no"]).splitlines() == [
        "run.yaml:3: engine.memory: expected a size such as 4GiB, 512MiB or 2GB, or auto, got "
        "'big'; write a number and a unit",
        "run.yaml:5: run.stepps: unknown key (did you mean 'steps'?); run has dir, steps, seed",
        "run.yaml:6: engines: expected a whole number, got 'two'; for example engines: 1",
        "command line, logging.every=no: expected a whole number, got 'no'; for "
        "example logging.every: 10 (steps)",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "optimzer.name=sgd",
            "command line, optimzer.name=sgd: optimzer: unknown key (did you mean 'optimizer'?); "
            f"a configuration has {_KEYS}",
        ),
        (
            "steps=5",
            "command line, steps=5: unknown key (did you mean 'run.steps'?); "
            f"a configuration has {_KEYS}",
        ),
        (
            "learning_rate=1e-3",
            "command line, learning_rate=1e-3: unknown key (did you mean "
            f"'optimizer.learning_rate'?); a configuration has {_KEYS}",
        ),
        (
            "lr=1e-3",
            "command line, lr=1e-3: unknown key (did you mean 'optimizer.learning_rate'?); "
            f"a configuration has {_KEYS}",
        ),
        (
            "batch_size=4",
            "command line, batch_size=4: unknown key (did you mean 'batch.size'?); "
            f"a configuration has {_KEYS}",
        ),
        (
            "path=x",
            "command line, path=x: unknown key (did you mean 'data.path' or "
            f"'store.flash.path'?); a configuration has {_KEYS}",
        ),
        (
            "run.learning_rate=1",
            "command line, run.learning_rate=1: unknown key (did you mean "
            "'optimizer.learning_rate'?); run has dir, steps, seed",
        ),
        (
            "engines",
            "command line: engines: expected key=value, for example engine.memory=4GiB",
        ),
        (
            "precision.type=bf16",
            "command line: precision.type=bf16: precision is 'fp32', which has no key 'type'; "
            "set precision as a whole",
        ),
        (
            "freeze=[a",
            "command line: freeze=[a: '[a' is not valid YAML; quote it for the shell",
        ),
        (
            f"run.seed=-{10**30}",
            "command line: run.seed: expected whole numbers between -2^64 and 2^64, got one of 31 "
            "digits",
        ),
    ],
)
def test_mistake_on_the_command_line_gives_its_message(tmp_path, monkeypatch, override, expected):
    text = "model: gpt2\nprecision: fp32\n"
    assert message(tmp_path, monkeypatch, text, [override]) == expected


def test_an_unknown_number_of_a_preset_names_the_closest(tmp_path, monkeypatch):
    said = message(tmp_path, monkeypatch, "model: {preset: gpt2, n_lyer: 3}\n")
    assert said.startswith(
        "run.yaml:1: model: preset gpt2 has no field 'n_lyer' (did you mean 'n_layer'?)"
    )


def test_missing_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        load("absent.yaml")
    assert str(raised.value) == (
        "absent.yaml: no such file; `penstock init absent.yaml` writes a starter there"
    )


def test_name_of_a_preset_in_place_of_a_file_is_answered_with_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        load("gpt2-xl")
    assert str(raised.value) == (
        "gpt2-xl: expected a YAML file, got the name of a preset; `penstock init gpt2-xl.yaml "
        "--model gpt2-xl` writes a starter with it"
    )
    (tmp_path / "gpt2-xl").write_text("model: tiny\n")
    assert load("gpt2-xl").model.preset == "tiny"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model: gpt2\n",
            "run.yaml: data: neither path nor input is given; set data.path to a folder made by "
            "`penstock data build`, or data.input to a list of text files",
        ),
        (
            "model: gpt2\ndata:\n  path: sets/books\n",
            "run.yaml:3: data.path: sets/books does not exist; make it with `penstock data build "
            "--input FILES --tokenizer bytes --out sets/books`, or list files in data.input",
        ),
        (
            "model: gpt2\ndata:\n  input:\n  - run.yaml\n  - texts/*.txt\n",
            "run.yaml:5: data.input[1]: 'texts/*.txt' matches no file; paths are relative to the "
            "current folder, {here}",
        ),
        (
            "model: gpt2\ndata:\n  input: [a.txt, run.yaml, b.txt]\n",
            "run.yaml:3: data.input: 'a.txt', 'b.txt' match no file; paths are relative to the "
            "current folder, {here}",
        ),
    ],
)
def test_missing_data_is_reported_only_for_training(tmp_path, monkeypatch, text, expected):
    said = message(tmp_path, monkeypatch, text, training=True)
    assert said == expected.format(here=tmp_path)
    assert load("run.yaml").model is not None


def test_mapping_from_python_is_reported_without_a_line():
    with pytest.raises(ConfigError) as raised:
        Config.from_mapping({"run": {"step": 1}})
    assert str(raised.value) == (
        "run.step: unknown key (did you mean 'steps'?); run has dir, steps, seed"
    )


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_key_of_another_trainer_suggests_the_existing_key(name):
    found = Config().to_mapping()
    for part in NAMES_ELSEWHERE[name].split("."):
        found = found[part]


@pytest.mark.parametrize("given", [None, 3, object()])
def test_invalid_configuration_type_is_refused(given):
    with pytest.raises(ConfigError) as raised:
        to_config(given, None)
    assert str(raised.value) == (
        "expected a configuration: a mapping or the path of a YAML file; got "
        f"{type(given).__name__}. A model goes into Trainer(configuration, model=...)"
    )
