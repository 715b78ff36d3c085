"""Adapters beside a bfloat16 checkpoint: 2 bytes per frozen weight, and the bits of 4.

The reference is the same checkpoint written in float32, which is kept in 4 bytes.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from grids import quick_combinations, quick_first
from hf_folders import model_of, save
from safetensors.torch import load_file, save_file
from tiny_models import LENGTH, language_model
from torch import nn
from typer.testing import CliRunner

from penstock import Trainer
from penstock.cli.app import app
from penstock.config import Config
from penstock.data import ArraySource
from penstock.distributed.run_spec import RunSpec, engine_digest, terms_of
from penstock.distributed.worker import roles
from penstock.engine import set_threads
from penstock.errors import ConfigError
from penstock.models import ModelSource
from penstock.planning import model_sources, selected_weights
from penstock.store import (
    checkpoint_bytes,
    checkpoint_hash,
    find_checkpoint,
    read_state,
    sealed_json,
)
from penstock.store.flash import open_reader
from penstock.telemetry.events import StepDone
from penstock.training.export import export_run
from penstock.weight_formats import BFLOAT16, DENSE, SPLIT

set_threads(1)  # for tensors this small a second thread is only waited for

TARGETS = {
    "llama": ["*.q_proj.weight", "*.v_proj.weight"],
    "gpt2": ["*.attn.c_attn.weight", "*.mlp.c_fc.weight"],
    "llama-tied": ["*.q_proj.weight"],
}
PRECISIONS = {"fp32": DENSE, "bf16": SPLIT}


def widened(folder: Path, wide: Path) -> Path:
    """Write the same checkpoint in float32."""
    shutil.copytree(folder, wide)
    for path in wide.glob("*.safetensors"):
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    return wide


def settings(model: Path, run: Path, steps: int, family: str = "llama", **changes) -> dict:
    return {
        "model": {"hf": str(model)},
        "lora": {"rank": 2, "targets": TARGETS[family]},
        "data": {"sequence_length": LENGTH},
        "batch": {"size": 4, "micro": 2},
        "optimizer": {"learning_rate": 1e-2, "schedule": {"name": "constant"}},
        "engine": {"threads": 1, "device": "cpu", "recompute": "never"},
        "run": {"dir": str(run), "steps": steps},
        "evaluation": {"every": None},
        "checkpoint": {"every": None},
        **changes,
    }


def trainer_of(config: dict, family: str = "llama", events=None) -> Trainer:
    rows = language_model(family.partition("-")[0]).arrays(0)
    listener = None if events is None else events.append
    return Trainer(config, source=ArraySource(rows), on_event=listener, quiet=True)


def trained(config: dict, family: str = "llama"):
    """Return losses, the hash of all weights, the bytes that streamed, and the memory's parts."""
    events: list = []
    trainer = trainer_of(config, family, events)
    trainer.train()
    steps = [event for event in events if isinstance(event, StepDone)]
    found = (
        [step.loss for step in steps],
        trainer.store.content_hash(),
        [step.streamed_bytes for step in steps],
        dict(trainer.store.memory_bytes),
    )
    trainer.close()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """For each family the folder in bfloat16, and the same in float32."""
    there = tmp_path_factory.mktemp("models")
    found = {}
    for family in TARGETS:
        narrow = save(model_of(family, seed=3, dtype=torch.bfloat16), there / family, None)
        found[family] = narrow, widened(narrow, there / f"{family}-wide")
    return found


@pytest.mark.parametrize(
    ("family", "precision"),
    quick_combinations(TARGETS, PRECISIONS, quick=[("gpt2", "bf16")]),
)
def test_bfloat16_checkpoint_trains_to_the_bits_of_float32(family, precision, folders, tmp_path):
    narrow, wide = (
        trained(settings(folder, tmp_path / str(number), 4, family, precision=precision), family)
        for number, folder in enumerate(folders[family])
    )
    assert narrow[0] == wide[0]
    assert narrow[1] == wide[1]
    source = ModelSource.from_hf(folders[family][0])
    frozen = source.parameter_count()
    assert narrow[3]["bfloat16"] == pytest.approx(2 * frozen, rel=0.02)  # filled up to cache lines
    widths = {"fp32": 2, "bf16": 1}[precision]
    of_adapters = sum(narrow[3].get(part, 0) for part in ("master", "high", "low"))
    whole = sum(wide[3].get(part, 0) for part in ("master", "high", "low"))
    assert whole - of_adapters == pytest.approx(4 * frozen, rel=0.02)
    if precision == "fp32":
        # Adapters are small: nearly all that streams halves.
        assert narrow[2][0] / wide[2][0] == pytest.approx(1 / widths, rel=0.1)
    else:
        assert narrow[2] == wide[2]


@pytest.fixture(scope="module")
def unbroken(folders, tmp_path_factory):
    """What four steps give in memory, without a stop."""
    run = tmp_path_factory.mktemp("unbroken")
    return trained(settings(folders["llama"][0], run, 4, precision="bf16"))


@pytest.mark.long
@pytest.mark.parametrize(
    "where", quick_first([{}, {"shards": 2}, "flash", "flash in shards"], ["flash in shards"])
)
def test_any_store_resumes_to_the_same_bits(where, folders, unbroken, tmp_path):
    model, expected = folders["llama"][0], unbroken
    store = where if isinstance(where, dict) else {
        "dram": "16MiB", "flash": {"path": str(tmp_path / "flash")},
        "shards": 2 if "shards" in where else 1,
    }  # fmt: skip
    first = trained(settings(model, tmp_path / "run", 2, precision="bf16", store=store))
    second = trained(settings(model, tmp_path / "run", 4, precision="bf16", store=store))
    assert [*first[0], *second[0]] == expected[0]
    assert second[1] == expected[1]


def test_checkpoint_holds_only_trained_weights_and_its_size_is_predicted(folders, tmp_path):
    model = folders["llama"][0]
    trainer = trainer_of(settings(model, tmp_path / "run", 2))
    trainer.train()
    saved = find_checkpoint(tmp_path / "run" / "checkpoints", "latest")
    state = read_state(saved)
    adapters = trainer.model.adapter_weights
    assert state.weights.keys() == adapters
    assert state.base_weights.keys() == set(trainer.program.weights) - adapters
    assert state.base.fingerprint == trainer.model.weights_fingerprint()
    assert state.bfloat16 == trainer.program.bfloat16 == state.base_weights.keys()
    on_disk = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    names = state.base_weights.keys()
    assert checkpoint_bytes(trainer.program, trainer.store.roles, names) == on_disk == state.bytes
    values = sum(trainer.program.weights[name].elements for name in adapters)
    headers = 2048 * len(list(saved.glob("*.safetensors")))
    assert 12 * values <= on_disk <= 12 * values + headers  # weights and two moments
    trainer.close()


@pytest.mark.long
def test_worker_compiles_the_same_program(folders, tmp_path):
    """A resumed run's workers do not look into the folder: they are told."""
    for steps in (1, 2):
        trainer = trainer_of(settings(folders["llama"][0], tmp_path / "run", steps))
        trainer.train()
        of_run = trainer.config, trainer._layout, trainer.model
        plan, told = RunSpec.of(*of_run), json.loads(json.dumps(terms_of(*of_run)))
        assert (told["kept"] is not None) == (steps == 2)
        made = roles._compile(told, "cpu", told["products"])
        assert (
            engine_digest(
                made.program, made.transfers, "cpu", told["products"], None, told["model"]
            )
            == plan.engine_digest
        )
        assert made.program.bfloat16 == trainer.program.bfloat16 != frozenset()
        trainer.close()


@pytest.mark.long
@pytest.mark.parametrize("family", quick_first(["llama", "llama-tied"], ["llama"]))
def test_float32_evaluation_and_recomputation_widen_bfloat16_weights(family, folders, tmp_path):
    found = []
    for number, folder in enumerate(folders[family]):
        config = settings(folder, tmp_path / str(number), 2, family)
        config["engine"]["recompute"] = "always"
        rows = language_model("llama").arrays(0)
        held_out = ArraySource(language_model("llama").arrays(1))
        trainer = Trainer(config, source=ArraySource(rows), held_out=held_out, quiet=True)
        trainer.train()
        found.append((trainer.evaluate(2), trainer.store.content_hash()))
        trainer.close()
    assert found[0] == found[1]


@pytest.mark.long
def test_best_checkpoint_with_flash_store_excludes_the_base(folders, tmp_path):
    flash = {"dram": "16MiB", "flash": {"path": str(tmp_path / "flash")}}
    for steps in (1, 2):  # the second time without the folder's weights at hand
        config = settings(
            folders["llama"][0], tmp_path / "run", steps, store=flash, precision="bf16",
            evaluation={"every": 1, "batches": 1}, checkpoint={"every": None, "best": True},
        )  # fmt: skip
        rows, others = (language_model("llama").arrays(seed) for seed in (0, 1))
        held_out = ArraySource(others)
        trainer = Trainer(config, source=ArraySource(rows), held_out=held_out, quiet=True)
        trainer.train()
        trainer.close()
        best = find_checkpoint(tmp_path / "run" / "checkpoints", "best")
        state = read_state(best)
        assert state.weights.keys() == trainer.model.adapter_weights
        base = model_sources.base_reader(trainer.config, state.base)
        with open_reader(tmp_path / "flash") as reader:
            assert checkpoint_hash(best, base) == reader.content_hash(state.step)


def test_another_base_is_refused(folders, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folders["llama"][0], model)
    run = tmp_path / "run"
    expected = trained(settings(model, run, 2))[1]
    fingerprint = ModelSource.from_hf(model).weights_fingerprint()
    other = save(model_of("llama", seed=4, dtype=torch.bfloat16), tmp_path / "other", None)
    with pytest.raises(ConfigError) as caught:
        trainer_of(settings(other, run, 3))
    assert str(caught.value).startswith("the checkpoints of this run hold only the trained weights")
    assert f"(fingerprint {fingerprint}); {other} is another" in str(caught.value)
    with pytest.raises(ConfigError, match="does not exist, but the checkpoints of this run need"):
        trainer_of(settings(tmp_path / "none", run, 3))
    moved = tmp_path / "moved"
    model.rename(moved)
    trainer = trainer_of(settings(moved, run, 3))
    assert (trainer.step, trainer.store.content_hash()) == (2, expected)
    trainer.close()


def test_changed_value_of_the_base_is_found(folders, tmp_path, monkeypatch):
    """The fingerprint is of samples; every weight has a checksum besides."""
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(folders["llama"][0], model)
    trained(settings(model, run, 2))
    fingerprint = ModelSource.from_hf(model).weights_fingerprint()
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(torch.int16)[1, 1] ^= 1
    save_file(tensors, path, {"format": "pt"})
    monkeypatch.setattr(ModelSource, "weights_fingerprint", lambda self: fingerprint)
    with pytest.raises(
        ConfigError, match=rf"weight {name} of the base: expected shape .* and checksum"
    ):
        trainer_of(settings(model, run, 3))


def test_export_and_inspect_find_the_base(folders, tmp_path):
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(folders["llama"][0], model)
    config = settings(model, run, 3)
    trainer = trainer_of(config)
    trainer.train()
    content = trainer.store.content_hash()
    trainer.export(tmp_path / "from-trainer")
    trainer.close()
    config.pop("data")
    export_run(Config.from_mapping(config), tmp_path / "from-files", "fp32", 10**9)
    ours, theirs = (
        load_file(tmp_path / name / "model.safetensors") for name in ("from-trainer", "from-files")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert CliRunner().invoke(app, ["inspect", str(run), "--hash"]).stdout.split() == [content]
    shutil.rmtree(model)
    export_run(Config.from_mapping(config), tmp_path / "alone", "fp32", 10**9, only_adapters=True)
    adapters = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert adapters["r"] == 2
    shown = CliRunner().invoke(app, ["inspect", str(run)])
    assert shown.exit_code == 0, shown.output
    assert "not hashed: model.hf: " in shown.stdout
    with pytest.raises(ConfigError, match="does not exist, but the checkpoints of this run need"):
        export_run(Config.from_mapping(config), tmp_path / "whole", "fp32", 10**9)


@pytest.mark.long
@pytest.mark.parametrize("precision", quick_first(PRECISIONS, ["bf16"]))
def test_bfloat16_module_keeps_frozen_weights_in_bfloat16(precision, tmp_path):
    """Nothing says where its values could be found again: a checkpoint holds them, in 2 bytes."""

    def config(name: str, steps: int) -> dict:
        made = settings(Path("unused"), tmp_path / name, steps, precision=precision)
        del made["model"]
        return made

    def run(name: str, steps: int, dtype: torch.dtype):
        module: nn.Module = model_of("llama", seed=5, dtype=torch.bfloat16).to(dtype)
        rows = language_model("llama").arrays(0)
        trainer = Trainer(config(name, steps), model=module, source=ArraySource(rows), quiet=True)
        trainer.train()
        found = trainer.store.content_hash()
        formats = {w.format for w in trainer.program.weights.values() if not w.trainable}
        trainer.close()
        return found, formats

    narrow = run("narrow", 3, torch.bfloat16)
    wide = run("wide", 3, torch.float32)
    assert narrow[0] == wide[0]
    assert (narrow[1], wide[1]) == ({BFLOAT16}, {PRECISIONS[precision]})
    run("stopped", 1, torch.bfloat16)
    assert run("stopped", 3, torch.bfloat16) == narrow
    state = read_state(find_checkpoint(tmp_path / "stopped" / "checkpoints", "latest"))
    assert state.base is None
    frozen = [p for n, p in state.tensors.items() if n.startswith("master/") and "lora" not in n]
    assert {place.extent.dtype for place in frozen} == {"BF16"}


@pytest.mark.long
def test_run_of_an_older_release_resumes_unchanged(folders, tmp_path, monkeypatch):
    """Its checkpoints hold all weights in float32: the folder may go, and nothing is narrowed."""
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(folders["llama"][0], model)
    expected = trained(settings(model, tmp_path / "unbroken", 4))
    with monkeypatch.context() as before:
        before.setattr(selected_weights, "kept_as_bfloat16", lambda *_: frozenset())
        before.setattr(ModelSource, "folder_weights", frozenset())
        first = trained(settings(model, run, 2))
    content = sealed_json.unseal(find_checkpoint(run / "checkpoints", "latest") / "state.json")
    assert content["version"] == 1
    shutil.rmtree(model)
    second = trained(settings(model, run, 4))
    assert [*first[0], *second[0]] == expected[0]
    assert second[1] == expected[1]
    assert "bfloat16" not in second[3]
    state = read_state(find_checkpoint(run / "checkpoints", "latest"))
    assert state.base is None
    assert state.bfloat16 == frozenset()


@pytest.mark.long
def test_trained_weights_beside_adapters_are_kept_in_float32(folders, tmp_path):
    model = folders["llama"][0]
    expected = {}
    for number, folder in enumerate((model, folders["llama"][1])):
        config = settings(folder, tmp_path / str(number), 3, train=["model.norm.weight"])
        trainer = trainer_of(config)
        assert trainer.program.weights["model.norm.weight"].format is DENSE
        trainer.train()
        expected[number] = trainer.store.content_hash()
        state = read_state(find_checkpoint(tmp_path / str(number) / "checkpoints", "latest"))
        assert "model.norm.weight" in state.weights
        trainer.close()
    assert expected[0] == expected[1]
