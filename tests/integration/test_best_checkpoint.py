"""`--best` opens the checkpoint with the lowest held-out loss of every kind of run."""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import penstock
from grids import quick_first
from safetensors.torch import load_file
from sparse_choices import chosen
from tiny_models import FIELDS
from torch import nn

from penstock import Trainer
from penstock.config import load_run
from penstock.data import ArraySource
from penstock.errors import ConfigError, CorruptionError
from penstock.models import InputSpec, ModelSource
from penstock.store import find_checkpoint, read_state
from penstock.telemetry import Evaluated
from penstock.training.export import export_run
from penstock.training.read_only_store import ReadOnlyStore

LEARNING, STEPS = 3, 6  # after these steps the learning rate is far too high
PRESET = {"preset": "tiny", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32}
SPARSE = {"method": "rigl", "sparsity": 0.7, "update_every": 2, "update_end": 6}
LORA = {
    "lora": {"rank": 2, "targets": ["*.q_proj.weight", "*.v_proj.weight"]},
    "optimizer": {
        "learning_rate": 1e-2,
        "schedule": {"name": "piecewise", "boundaries": [LEARNING], "ratios": [3000.0]},
    },
}
KINDS = {
    "memory": {},
    "bf16": {"precision": "bf16"},
    "shards": {"store": {"shards": 2}},
    "sparse": {"sparsity": SPARSE, "precision": "bf16"},
    "lora": LORA,
    "flash": {"store": {"dram": "16MiB", "flash": {"path": "flash"}}},
    "flash in shards": {"store": {"dram": "16MiB", "flash": {"path": "flash"}, "shards": 2}},
    "sparse on flash": {
        "sparsity": SPARSE,
        "store": {"dram": "16MiB", "flash": {"path": "flash"}, "shards": 2},
    },
    "lora on flash": {**LORA, "store": {"dram": "16MiB", "flash": {"path": "flash"}}},
}


def settings(folder: Path, **changes) -> dict:
    found = {
        "model": PRESET,
        "data": {"input": [str(folder / "text.txt")], "tokenizer": "bytes", "validation": 0.2,
                 "sequence_length": 16},
        "batch": {"size": 4, "micro": 2},
        "optimizer": {
            "learning_rate": 3e-3,
            "schedule": {"name": "piecewise", "boundaries": [LEARNING], "ratios": [300.0]},
        },
        "engine": {"threads": 1},
        "run": {"dir": str(folder / "run"), "steps": STEPS},
        "evaluation": {"every": 1, "batches": 2},
        "checkpoint": {"every": None},
        **changes,
    }  # fmt: skip
    flash = found.get("store", {}).get("flash")
    if flash is not None:
        found["store"] = {**found["store"], "flash": {"path": str(folder / flash["path"])}}
    return found


@dataclass
class Trained:
    """A run whose best state is not its last, and what its best state was when it was reached."""

    folder: Path
    losses: list[float] = field(default_factory=list)
    step: int = 0  # the best one
    text: str = ""

    @property
    def run(self) -> Path:
        return self.folder / "run"


def llama_in(folder: Path) -> Path:
    """Save a small model for byte tokens, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model("llama", **{**FIELDS["llama"], "vocab_size": 257})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def trained_in(folder: Path, kind: str) -> Trained:
    words = random.Random(1).choices(["water ", "weights ", "stream\n", "layers "], k=400)
    (folder / "text.txt").write_text("".join(words))
    config, done = settings(folder, **KINDS[kind]), Trained(folder)
    if "lora" in config:
        config["model"] = {"hf": str(llama_in(folder / "hf"))}

    def listen(event):
        if isinstance(event, Evaluated):
            done.losses.append(event.loss)
            if event.best:
                shutil.rmtree(folder / "expected", ignore_errors=True)
                trainer.export(folder / "expected")
                done.step, done.text = event.step, written_by(trainer)

    with chosen():
        trainer = Trainer(config, on_event=listen, quiet=True)
        trainer.train()
    trainer.close()
    assert done.losses.index(min(done.losses)) == done.step - 1 < STEPS - 1
    return done


def written_by(trainer: Trainer) -> str:
    return "".join(trainer.generate("water", max_new_tokens=8, temperature=1.0, seed=3))


@pytest.fixture(scope="module", params=quick_first(KINDS, ["memory", "sparse on flash"]))
def trained(request, tmp_path_factory):
    return trained_in(tmp_path_factory.mktemp("best"), request.param)


def best_trainer(run: Path) -> Trainer:
    return Trainer(load_run(run), best=True, must_exist=True, cluster="none", quiet=True)


@pytest.fixture(autouse=True)
def _products_are_not_measured():
    with chosen():
        yield


def assert_equal_files(found: Path, expected: Path) -> None:
    assert sorted(path.name for path in found.iterdir()) == sorted(
        path.name for path in expected.iterdir()
    )
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.int32), tensor.view(torch.int32)), name
    for name in ("config.json", "tokenizer.json"):
        assert (found / name).read_bytes() == (expected / name).read_bytes()


def test_best_state_has_the_recorded_loss_and_text_to_the_last_digit(trained):
    trainer = best_trainer(trained.run)
    assert trainer.step == trained.step
    assert trainer.evaluate()["loss"] == min(trained.losses)
    assert written_by(trainer) == trained.text
    trainer.store.close()  # nothing stays in memory: every weight is read again
    trainer.store._budget_bytes = 0
    assert trainer.evaluate()["loss"] == min(trained.losses)
    trainer.close()
    newest = Trainer(load_run(trained.run), cluster="none", quiet=True)
    assert newest.evaluate()["loss"] == trained.losses[-1] != min(trained.losses)
    newest.close()


def test_best_export_equals_the_export_of_that_step(trained, tmp_path):
    done = penstock("export", trained.run, tmp_path / "out", "--best")
    assert done.returncode == 0, done.stderr
    assert_equal_files(tmp_path / "out", trained.folder / "expected")
    trainer = best_trainer(trained.run)
    trainer.export(tmp_path / "from trainer")
    hashed = trainer.store.content_hash()
    trainer.close()
    assert_equal_files(tmp_path / "from trainer", trained.folder / "expected")
    newest = penstock("inspect", trained.run, "--hash").stdout.strip()
    assert hashed != newest


@pytest.mark.long
@pytest.mark.parametrize("kind", ["lora", "lora on flash"])
def test_best_adapters_are_exported_without_their_base(kind, tmp_path):
    trained = trained_in(tmp_path, kind)
    trainer = best_trainer(trained.run)
    trainer.export_adapters(tmp_path / "expected adapters")
    trainer.close()
    shutil.rmtree(tmp_path / "hf")
    done = penstock("export", trained.run, tmp_path / "adapters", "--best", "--adapters")
    assert done.returncode == 0, done.stderr
    newest = penstock("export", trained.run, tmp_path / "newest", "--adapters")
    assert newest.returncode == 0, newest.stderr
    best, expected, last = (
        (tmp_path / name / "adapter_model.safetensors").read_bytes()
        for name in ("adapters", "expected adapters", "newest")
    )
    assert best == expected != last


def test_commands_take_the_best_state(trained, tmp_path):
    expected, last = min(trained.losses), trained.losses[-1]
    best, newest = penstock("eval", trained.run, "--best"), penstock("eval", trained.run)
    assert best.stdout.startswith(f"step {trained.step}  loss {expected:.4f}"), best
    assert newest.stdout.startswith(f"step {STEPS}  loss {last:.4f}"), newest
    options = ("--prompt", "water", "--max-new-tokens", 8, "--temperature", 1, "--seed", 3)
    done = penstock("generate", trained.run, "--best", *options)
    assert done.stdout == f"water{trained.text}\n"


def test_best_state_is_opened_without_the_store_on_flash(tmp_path):
    trained = trained_in(tmp_path, "flash")
    shutil.rmtree(tmp_path / "flash")
    done = penstock("eval", trained.run, "--best")
    assert done.stdout.startswith(f"step {trained.step}  loss {min(trained.losses):.4f}"), done
    assert penstock("export", trained.run, tmp_path / "out", "--best").returncode == 0
    assert_equal_files(tmp_path / "out", trained.folder / "expected")


@pytest.mark.long
def test_packed_best_export_has_the_masks_of_that_step(tmp_path):
    trained = trained_in(tmp_path, "sparse on flash")
    done = penstock("export", trained.run, tmp_path / "packed", "--best", "--packed")
    assert done.returncode == 0, done.stderr
    packed = dict(ModelSource.from_hf(tmp_path / "packed").initial_weights(0))
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    assert packed.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(packed[name], tensor), name


def test_damaged_best_checkpoint_is_refused(tmp_path):
    trained = trained_in(tmp_path, "memory")
    best = find_checkpoint(trained.run / "checkpoints", "best")
    *_, file = sorted(best.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptionError, match=f"{file.name}: damaged in bytes"):
        export_run(load_run(trained.run), tmp_path / "out", "fp32", 1 << 30, best=True)
    trainer = best_trainer(trained.run)
    with pytest.raises(CorruptionError, match=f"{file.name}: damaged in bytes"):
        trainer.evaluate()
    trainer.close()
    assert penstock("eval", trained.run).returncode == 0


# --- a run of given rows, without a data set ------------------------------------------------------


def rows(seed=0):
    x = np.random.default_rng(seed).standard_normal((32, 4)).astype(np.float32)
    return {"x": x, "y": x[:, :1] * x[:, 1:2]}


def net_trainer(folder, losses=(), module=None, **changes):
    """Return a trainer of a small module; its evaluations during training find `losses`."""
    torch.manual_seed(0)
    model = ModelSource.from_module(
        module or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        loss=nn.functional.mse_loss,
        inputs={"input": InputSpec((4,))},
        targets={"target": InputSpec((1,))},
    )
    arrays = [ArraySource({"input": x, "target": y}) for x, y in (rows(s).values() for s in (0, 1))]
    best = changes.pop("best", False)
    config = {
        "batch": {"size": 8, "micro": 8},
        "optimizer": {"schedule": {"name": "constant"}},
        "engine": {"threads": 1},
        "run": {"dir": str(folder), "steps": 4},
        "evaluation": {"every": 1, "batches": 1},
        **changes,
    }
    trainer = Trainer(
        config, model=model, source=arrays[0], held_out=arrays[1], best=best, quiet=True
    )
    if losses:
        given = iter(losses)
        trainer._evaluator.evaluate = lambda batches, should_stop, on_batch: {
            "loss": next(given),
            "tokens": 1,
        }
    return trainer


def test_trainer_of_the_best_state_does_not_train(tmp_path):
    net_trainer(tmp_path, [3.0, 2.0, 2.5, 4.0]).train()
    record = (tmp_path / "config.yaml").read_bytes()
    trainer = net_trainer(tmp_path, best=True, run={"dir": str(tmp_path), "steps": 9})
    assert trainer.step == 2
    assert isinstance(trainer.store, ReadOnlyStore)
    for call in (trainer.train, trainer.run_step):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value) == (
            "Trainer(best=True) evaluates, generates and exports, and does not train; use "
            "Trainer(config) to continue the run from its newest state, or export the best "
            "checkpoint and start a new run from the export (model.hf)"
        )
    trainer.save()  # it is saved already
    trainer.close()
    assert (tmp_path / "config.yaml").read_bytes() == record
    assert find_checkpoint(tmp_path / "checkpoints", "latest").name == "step-00000004"
    again = net_trainer(tmp_path, [1.0], run={"dir": str(tmp_path), "steps": 5})
    assert (again.step, again.train()["steps"]) == (4, 1)


def test_weights_of_another_model_are_refused(tmp_path):
    net_trainer(tmp_path, [3.0, 2.0, 2.5, 4.0]).train()
    wider = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
    with pytest.raises(ConfigError) as caught:
        net_trainer(tmp_path, best=True, module=wider)
    best = find_checkpoint(tmp_path / "checkpoints", "best")
    assert str(caught.value) == (
        f"{best}: a checkpoint of another model, which differs in 0.weight, 0.bias, 2.weight; use "
        "the configuration that wrote it"
    )


NEWEST = "or open the newest state, without --best (from Python: without best=True)"


def refusal_of_best(folder, **changes):
    with pytest.raises(ConfigError) as caught:
        net_trainer(folder, best=True, **changes)
    return str(caught.value)


@pytest.mark.parametrize("tier", ["memory", "flash"])
def test_run_without_a_best_checkpoint_says_why(tier, tmp_path):
    def changes(name):
        flash = {"dram": "16MiB", "flash": {"path": str(tmp_path / name / "flash")}}
        return {"store": flash} if tier == "flash" else {}

    def trained(name, **keys):
        trainer = net_trainer(tmp_path / name, **changes(name), **keys)
        trainer.train()
        trainer.close()
        return refusal_of_best(tmp_path / name, **changes(name), **keys)

    folder = tmp_path / "none"
    assert refusal_of_best(folder, **changes("none")) == (
        f"{folder} holds no checkpoint: nothing was trained there yet; run `penstock train` first"
    )
    assert trained("off", checkpoint={"best": False}) == (
        f"{tmp_path / 'off'}: no best checkpoint was kept, since checkpoint.best is false; set "
        f"checkpoint.best: true and train further, {NEWEST}"
    )
    assert trained("never", evaluation={"every": None}) == (
        f"{tmp_path / 'never'}: no best checkpoint was kept, since evaluation.every is null: no "
        f"held-out loss was measured; set evaluation.every and train further, {NEWEST}"
    )
    keys = {**changes("early"), "evaluation": {"every": 5}}
    with closing(net_trainer(tmp_path / "early", **keys)) as trainer:
        trainer.run_step()
        trainer.save()
    assert refusal_of_best(tmp_path / "early", **keys) == (
        f"{tmp_path / 'early'}: no best checkpoint was kept, since the run has not been evaluated "
        "yet (evaluation.every is 5 steps, and evaluations need held-out data); train further, "
        f"{NEWEST}"
    )
    trained("off", checkpoint={"best": False})
    assert refusal_of_best(tmp_path / "off", **changes("off")).endswith(
        "is not there: it was deleted, or checkpoint.best was false; train further, so that the "
        f"next lower loss is kept, {NEWEST}"
    )


def test_commands_say_why_there_is_no_best_checkpoint(tmp_path):
    (tmp_path / "text.txt").write_text("water weights stream layers\n" * 100)
    Trainer(settings(tmp_path, checkpoint={"best": False}), quiet=True).train()
    run = tmp_path / "run"
    for command in (("eval", run), ("generate", run), ("export", run, tmp_path / "out")):
        done = penstock(*command, "--best")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"error: {run}: no best checkpoint was kept, since checkpoint.best is false; set "
            f"checkpoint.best: true and train further, {NEWEST}\n"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tier", ["memory", "flash"])
def test_lower_loss_whose_checkpoint_was_not_kept_is_named(tier, tmp_path):
    flash = {"dram": "16MiB", "flash": {"path": str(tmp_path / "flash")}}
    store = {"store": flash} if tier == "flash" else {}
    first = net_trainer(tmp_path, [3.0, 2.0, 2.5, 4.0], **store)
    first.train()
    first.close()
    later = {"run": {"dir": str(tmp_path), "steps": 6}, **store}
    second = net_trainer(tmp_path, [1.5, 1.75], checkpoint={"best": False}, **later)
    second.train()
    second.close()
    best = find_checkpoint(tmp_path / "checkpoints", "best")
    assert read_state(best).step == 2
    assert refusal_of_best(tmp_path, **later) == (
        f"{best}: expected the checkpoint with the lowest held-out loss of the run, 1.5, got one "
        "with 2: no checkpoint of the lower loss was kept (checkpoint.best was false, or the run "
        "was killed while it was written); train further, so that the next lower loss is kept, "
        f"{NEWEST}"
    )
    if tier == "flash":  # with a store that cannot be read, the best checkpoint is all there is
        shutil.rmtree(tmp_path / "flash")
        trainer = net_trainer(tmp_path, best=True, **later)
        assert trainer.step == 2
        trainer.close()
