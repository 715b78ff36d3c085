"""Whole runs with a store on flash: the bits of a run in memory, resumed, inspected, repaired."""

import re
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from penstock import Trainer
from penstock.cli.app import app
from penstock.data import ArraySource
from penstock.errors import BudgetError, ConfigError, CorruptionError
from penstock.models import InputSpec, ModelSource
from penstock.telemetry.events import StepDone

ROOT = Path(__file__).parents[2]


def config(folder: Path, steps: int, on_flash: bool, **store) -> dict:
    if on_flash:
        store = {"dram": "16MiB", "flash": {"path": str(folder / "flash")}, **store}
    return {
        "model": {"preset": "tiny", "n_positions": 64},
        "data": {"input": [str(ROOT / "LICENSE")], "validation": 0.2},
        "batch": {"size": 8, "micro": 2},
        "precision": "bf16",
        "optimizer": {"learning_rate": 1e-3, "schedule": {"name": "constant"}},
        "store": store,
        "run": {"dir": str(folder), "steps": steps},
        "evaluation": {"every": 3, "batches": 1},
    }


def inspected(*arguments):
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=True)
    return result


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory") / "run"
    trainer = Trainer(config(folder, 7, on_flash=False))
    trainer.train()
    return trainer, trainer.store.content_hash()


@pytest.mark.long
@pytest.mark.usefixtures("speculated")
def test_run_on_flash_equals_run_in_memory(in_memory, tmp_path):
    steps = []

    def listen(event):
        if isinstance(event, StepDone):
            steps.append(event)

    trainer = Trainer(config(tmp_path / "run", 7, on_flash=True), on_event=listen)
    trainer.train()
    other, weights = in_memory
    written, expected = (
        (each.evaluate(), "".join(each.generate("The ", seed=1))) for each in (trainer, other)
    )
    trainer.close()
    assert written == expected
    assert inspected(tmp_path / "run", "--hash").output == weights + "\n"
    assert sum(step.flash_written_bytes for step in steps) > 0
    export = Trainer(config(tmp_path / "run", 7, on_flash=True), must_exist=True)
    export.export(tmp_path / "exported")
    export.close()
    assert (tmp_path / "exported" / "model.safetensors").exists()


def test_flash_folder_of_another_run_is_refused_by_name(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    flash = tmp_path / "flash"

    def trainer(folder, steps):
        settings = config(folder, steps, on_flash=True)
        settings["store"]["flash"]["path"] = str(flash)
        return Trainer(settings, quiet=True)

    with closing(trainer(first, 2)) as started:
        started.train()
    with pytest.raises(ConfigError) as caught:
        trainer(second, 4)
    assert str(caught.value) == (
        f"store.flash.path: {flash} holds the weights of another run, {first}; choose another "
        f"folder for {second}, or set run.dir to {first} to train that run further"
    )
    assert not (second / "config.yaml").exists()
    monkeypatch.chdir(tmp_path)
    with closing(trainer(Path("first"), 2)) as same:  # by another name
        assert same.step == 2
    copied = shutil.copytree(first, tmp_path / "copied")
    own = tmp_path / "own flash"
    shutil.copytree(flash, own)
    settings = config(copied, 3, on_flash=True)
    settings["store"]["flash"]["path"] = str(own)
    with closing(Trainer(settings, quiet=True)) as copy:
        assert copy.step == 2
    first.rename(second)  # a run that was moved keeps its store
    with closing(trainer(second, 3)) as moved:
        assert moved.step == 2
        moved.train()
    assert not first.exists()


@pytest.mark.usefixtures("speculated")
def test_stopped_run_on_flash_resumes_to_the_same_bits(in_memory, tmp_path):
    for steps in (2, 5, 7):
        trainer = Trainer(config(tmp_path / "run", steps, on_flash=True))
        trainer.train()
        trainer.close()
    assert inspected(tmp_path / "run", "--hash").output == in_memory[1] + "\n"


@pytest.mark.usefixtures("speculated")
def test_damage_is_named_and_repair_rolls_back_to_an_intact_step(in_memory, tmp_path):
    settings = config(tmp_path / "run", 7, on_flash=True)
    trainer = Trainer(settings)
    trainer.train()
    unit = trainer.store._layout.units[1]
    place = unit.stream_offset(trainer.store._version._place[1])
    trainer.close()
    extents = tmp_path / "run" / "flash" / "extents"
    with extents.open("r+b") as file:
        file.seek(place + 100)
        byte = file.read(1)[0]
        file.seek(place + 100)
        file.write(bytes([byte ^ 8]))
    shown = inspected(tmp_path / "run")
    assert isinstance(shown.exception, CorruptionError)
    assert "durable      step 6  all checksums match" in shown.output
    assert "durable      step 7  DAMAGED (newest)" in shown.output
    assert "extents: damaged in bytes" in str(shown.exception)
    repaired = inspected(tmp_path / "run", "--repair")
    assert repaired.output == (
        f"{tmp_path / 'run' / 'flash'} is at step 6, all checksums match\n"
        "discarded: step 7 (damaged)\n"
        f"data         {tmp_path / 'run' / 'data'}  all checksums match\n"
    )
    again = inspected(tmp_path / "run", "--repair").output
    assert "\ndiscarded: nothing: no byte is damaged\n" in again
    saved = "saved        step 6, the newest saved one: a start from it repeats step 7\n"
    assert saved in inspected(tmp_path / "run").output
    again = Trainer(settings)
    assert again.step == 6
    again.train()
    again.close()
    assert inspected(tmp_path / "run", "--hash").output == in_memory[1] + "\n"


def test_impossible_budgets_are_refused_with_the_sums(tmp_path):
    with pytest.raises(
        BudgetError, match=r"all weights, gradients and optimizer state need [\d,]+"
    ):
        Trainer(config(tmp_path / "a", 7, on_flash=True, dram="1MiB"))
    flash = {"path": str(tmp_path / "b" / "flash"), "size": "1MiB"}
    with pytest.raises(BudgetError, match=r"store\.flash\.size: .* needs [\d,]+ bytes on flash"):
        Trainer(config(tmp_path / "b", 7, on_flash=True, flash=flash))
    with pytest.raises(BudgetError, match=r"store\.dram: the store of tiny needs [\d,]+ bytes"):
        Trainer(config(tmp_path / "c", 7, on_flash=False, dram="1MiB"))


@pytest.mark.long
def test_run_with_the_least_store_memory_evaluates_and_generates_between_steps(tmp_path):
    """The embedding and the head, which are not tied, are larger than the layers between."""
    fields = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512}
    fields |= {"num_hidden_layers": 8, "num_attention_heads": 4, "tie_word_embeddings": False}
    fields |= {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 32}
    rows = np.random.default_rng(0).integers(0, 4096, (24, 33))
    arrays = {"input_ids": rows[:, :-1].copy(), "labels": rows[:, 1:].copy()}
    settings = {
        "batch": {"size": 4, "micro": 2},
        "data": {"sequence_length": 32},
        "evaluation": {"every": 1, "batches": 2},
        "store": {"dram": "1KiB", "flash": {"path": str(tmp_path / "flash")}},
        "run": {"dir": str(tmp_path / "run"), "steps": 3},
    }

    def trainer() -> Trainer:
        return Trainer(
            settings,
            model=ModelSource.from_hf_config({"model_type": "llama", **fields}),
            source=ArraySource(arrays),
            held_out=ArraySource({name: part[:8] for name, part in arrays.items()}),
            quiet=True,
        )

    with pytest.raises(BudgetError, match=r"store\.dram") as caught:
        trainer()
    least = re.search(r"raise store\.dram to ([\d,]+)", str(caught.value))
    settings["store"]["dram"] = int(least[1].replace(",", ""))
    with closing(trainer()) as run:
        run.train()
        text = run.token_generator().generate([1, 2, 3], max_new_tokens=4, temperature=0)
        assert len(list(text)) == 4
        assert run.evaluate(batches=2)["loss"] > 0


def begun(folder, seed=0, adapters=None, source=None):
    """Return the weights of a run on flash that has not trained yet, and whether it said so."""
    words = []
    settings = {
        "store": {"flash": {"path": str(folder / "flash")}},
        "optimizer": {"schedule": {"name": "constant"}},
        "batch": {"size": 4},
        "run": {"dir": str(folder), "seed": seed, "steps": 2},
    }
    if adapters is not None:
        settings["lora"] = {"rank": adapters, "targets": ["0.weight"]}
    trainer = Trainer(
        settings,
        model=source or ModelSource.from_factory("test_flash_runs:two_layers", **SHAPES),
        source=ArraySource(
            {"input": np.ones((8, 6), np.float32), "target": np.ones((8, 2), np.float32)}
        ),
        on_event=words.append,
    )
    weights = {name: trainer.store.master(name) for name in trainer.program.weights}
    trainer.close()
    return weights, any("loaded again" in str(word) for word in words)


SHAPES = {
    "inputs": {"input": InputSpec((6,))},
    "targets": {"target": InputSpec((2,))},
    "loss": nn.functional.mse_loss,
}


def two_layers():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def plain(seed):
    torch.manual_seed(seed)
    return two_layers()


def test_untrained_weights_on_flash_are_replaced_for_another_run(tmp_path):
    for seed, is_anew in ((0, False), (0, False), (1, True), (0, True)):
        weights, said = begun(tmp_path, seed)
        assert same(weights, dict(plain(seed).named_parameters())), seed
        assert said == is_anew


def test_values_of_a_built_module_are_used_on_flash(tmp_path):
    for seed, is_anew in ((5, False), (6, True), (6, False)):
        module = plain(seed)
        weights, said = begun(tmp_path, source=ModelSource.from_module(module, **SHAPES))
        assert same(weights, dict(module.named_parameters()))
        assert said == is_anew


def test_untrained_adapters_and_frozen_weights_are_loaded_again(tmp_path):
    first, _ = begun(tmp_path / "run", 0, adapters=2)
    second, said = begun(tmp_path / "run", 1, adapters=2)
    wanted, _ = begun(tmp_path / "other", 1, adapters=2)
    assert said
    assert same(second, wanted)
    assert not same(first, second)
    wider, said = begun(tmp_path / "run", 1, adapters=3)  # another layout on flash
    assert said
    assert wider.keys() == second.keys()
    assert not same(wider, second)


class Block(nn.Module):
    """One stage, unless that is too much for an engine."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(256, 256) for _ in range(3))

    def forward(self, x):
        return x + self.three(self.two(self.one(x).tanh()).tanh())


def blocks():
    return nn.Sequential(nn.Linear(6, 256), Block(), Block(), nn.Linear(256, 2))


def of_blocks(folder, steps, engine, **flash):
    settings = {
        "store": {"flash": {"path": str(folder / "flash"), **flash}},
        "optimizer": {"schedule": {"name": "constant"}},
        "batch": {"size": 4, "micro": 4},
        "engine": {"memory": engine},
        "run": {"dir": str(folder), "steps": steps},
    }
    return Trainer(
        settings,
        model=ModelSource.from_factory("test_flash_runs:blocks", **SHAPES),
        source=ArraySource(
            {"input": np.ones((8, 6), np.float32), "target": np.ones((8, 2), np.float32)}
        ),
    )


@pytest.mark.long
def test_run_on_flash_resumes_with_other_engine_memory(tmp_path):
    """The files are laid out by the stages, which stay cut as the run began."""
    for steps, engine in ((1, "1300KiB"), (2, "64MiB")):
        trainer = of_blocks(tmp_path / "cut", steps, engine)
        trainer.train()
        trainer.close()
    stages = len(trainer.program.stages)
    trainer = of_blocks(tmp_path / "whole", 1, "64MiB")
    trainer.train()
    trainer.close()
    assert trainer.step == 1
    assert stages > len(trainer.program.stages)
    with pytest.raises(ConfigError, match=r"this model, divided into other stages.*memory"):
        of_blocks(tmp_path / "whole", 2, "1300KiB")


@pytest.mark.parametrize(
    "what",
    ["penstock.models.ModelSource.initial_weights", "penstock.planning.builders.make_engines"],
)
@pytest.mark.parametrize("error", [CorruptionError("a damaged file"), KeyboardInterrupt()])
def test_failed_trainer_construction_leaves_no_store_open(what, error, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(what, fails)
        with pytest.raises(type(error)) as raised:
            begun(tmp_path)
    weights, _ = begun(tmp_path)
    assert same(weights, dict(plain(0).named_parameters()))
    del raised  # its traceback held what the first trainer had made
