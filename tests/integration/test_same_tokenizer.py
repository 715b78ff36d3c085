"""A run is evaluated, generated from and exported with its own tokenizer, or not at all."""

from __future__ import annotations

import json
import shutil

import pytest
from command_line import penstock

from penstock import Trainer
from penstock.config import load_run
from penstock.data import TokenDataset, build_dataset, load_tokenizer, tokenizer_digest
from penstock.errors import DataError
from penstock.store import find_checkpoint, read_state
from penstock.store.flash import recorded_extra
from penstock.training.export import export_run
from penstock.training.resume_state import ResumeState

TEXTS = {
    "own": "water turns the wheel, weights turn the loss, and the stream goes on\n" * 100,
    "other": "quick zebras jump over many lazy foxes by the six old mills in June\n" * 100,
}
SIZE = 280


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two texts: a data set of each with its own BPE of equal size, and of the second text one
    with the tokenizer of the first."""
    folder = tmp_path_factory.mktemp("made")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
        build_dataset([folder / f"{name}.txt"], f"train-bpe:{SIZE}", folder / name, validation=0.2)
    build_dataset([folder / "other.txt"], str(folder / "own"), folder / "same", validation=0.2)
    own, other, same = (TokenDataset.open(folder / name) for name in ("own", "other", "same"))
    assert own.vocab_size == other.vocab_size == same.vocab_size == SIZE
    return folder


def train(folder, made, tier="memory"):
    """Train a run on a copy of the first data set; return the run's folder."""
    shutil.copytree(made / "own", folder / "set")
    config = {
        "model": {"preset": "tiny", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32,
                  "vocab_size": SIZE},
        "data": {"path": str(folder / "set"), "sequence_length": 16},
        "batch": {"size": 4, "micro": 4},
        "optimizer": {"schedule": {"name": "constant"}},
        "engine": {"threads": 1},
        "run": {"dir": str(folder / "run"), "steps": 2},
        "evaluation": {"every": None},
    }  # fmt: skip
    if tier == "flash":
        config["store"] = {"dram": "16MiB", "flash": {"path": str(folder / "flash")}}
    trainer = Trainer(config, quiet=True)
    trainer.train()
    trainer.close()
    return folder / "run"


def recorded_in(run, tier="memory"):
    if tier == "flash":
        return recorded_extra(run.parent / "flash")
    return read_state(find_checkpoint(run / "checkpoints", "latest")).extra


def refusal(run, found, place):
    return (
        f"error: {place}: expected the tokenizer that {run} was trained with, got another one "
        f"({found}), whose ids mean other text; restore the data set, or set data.path to a data "
        "set that was built with the run's data set as its tokenizer\n"
    )


@pytest.mark.parametrize("tier", ["memory", "flash"])
def test_digest_of_the_tokenizer_is_recorded(tier, made, tmp_path):
    run = train(tmp_path, made, tier)
    assert recorded_in(run, tier)["tokenizer"] == tokenizer_digest(
        load_tokenizer(str(made / "own"))
    )


@pytest.mark.parametrize("tier", ["memory", "flash"])
def test_data_set_rebuilt_with_another_tokenizer_is_refused_by_every_use(tier, made, tmp_path):
    run = train(tmp_path, made, tier)
    shutil.rmtree(tmp_path / "set")
    shutil.copytree(made / "other", tmp_path / "set")
    expected = refusal(run, f"train-bpe:{SIZE}", tmp_path / "set")
    for command in (("eval", run), ("generate", run), ("export", run, tmp_path / "out")):
        done = penstock(*command)
        assert (done.returncode, done.stderr) == (3, expected), command
        assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_evaluation_on_other_text_needs_the_tokenizer_of_the_run(made, tmp_path):
    run = train(tmp_path, made)
    own = penstock("eval", run)
    same = penstock("eval", run, f"data.path={made / 'same'}")
    assert same.returncode == 0, same.stderr
    assert same.stdout != own.stdout
    other = penstock("eval", run, f"data.path={made / 'other'}")
    expected = refusal(run, f"train-bpe:{SIZE}", made / "other")
    assert (other.returncode, other.stderr) == (3, expected)


def test_training_on_other_text_of_the_same_tokenizer_is_still_refused(made, tmp_path):
    run = train(tmp_path, made)
    trainer = Trainer(load_run(run, [f"data.path={made / 'same'}", "run.steps=4"]), quiet=True)
    with pytest.raises(DataError, match="was trained on another data set than"):
        trainer.train()


def older_release(monkeypatch):
    whole = ResumeState.to_mapping
    monkeypatch.setattr(
        ResumeState,
        "to_mapping",
        lambda self: {k: v for k, v in whole(self).items() if k != "tokenizer"},
    )


@pytest.mark.parametrize("tier", ["memory", "flash"])
def test_run_of_an_older_release_is_compared_with_its_data_set(tier, made, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        older_release(patched)
        run = train(tmp_path, made, tier)
    assert "tokenizer" not in recorded_in(run, tier)
    for name, code in (("own", 0), ("same", 0), ("other", 3)):
        done = penstock("eval", run, f"data.path={made / name}")
        assert done.returncode == code, (name, done.stderr)
    assert done.stderr == refusal(run, f"train-bpe:{SIZE}", made / "other")
    assert penstock("export", run, tmp_path / "out").returncode == 0
    shutil.rmtree(tmp_path / "set")
    assert penstock("eval", run, f"data.path={made / 'other'}").returncode == 0  # as before
    shutil.copytree(made / "other", tmp_path / "set")
    for command in (("eval", run), ("generate", run), ("export", run, tmp_path / "again")):
        done = penstock(*command)
        assert (done.returncode, done.stderr) == (
            3,
            f"error: {tmp_path / 'set'}: expected the data set that {run} was trained on, got "
            f"another one (tokenizer train-bpe:{SIZE}), and the run does not record its tokenizer; "
            "restore the data set, or set data.path to a data set of the same tokenizer\n",
        ), command


def test_resumed_run_of_an_older_release_records_the_digest(made, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        older_release(patched)
        run = train(tmp_path, made)
    trainer = Trainer(load_run(run, ["run.steps=4"]), quiet=True)
    assert trainer.train()["steps"] == 2
    assert recorded_in(run)["tokenizer"] == tokenizer_digest(load_tokenizer(str(made / "own")))


def test_run_without_its_data_set_is_exported_without_a_tokenizer(made, tmp_path):
    run = train(tmp_path, made)
    shutil.rmtree(tmp_path / "set")
    export_run(load_run(run), tmp_path / "out", "fp32", 1 << 30)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


class Content:
    """A tokenizer of which only the content of its file is asked for."""

    def __init__(self, content):
        self._content = content

    def to_json(self):
        return json.dumps(self._content)


def test_digest_depends_on_encoding_rules_alone(made):
    content = json.loads(load_tokenizer(str(made / "own")).to_json())
    digest = tokenizer_digest(Content(content))

    def changed(**fields):
        return tokenizer_digest(Content({**content, **fields}))

    model, vocabulary = content["model"], content["model"]["vocab"]
    assert changed(post_processor={"type": "Sequence"}, truncation={"max_length": 5}) == digest
    assert changed(model={**model, "new_field": None, "new_switch": False}) == digest
    assert changed(model={**model, "new_switch": True}) != digest
    assert changed(normalizer={"type": "Lowercase"}) != digest
    assert changed(pre_tokenizer={**content["pre_tokenizer"], "use_regex": False}) != digest
    assert changed(added_tokens=[]) != digest
    assert changed(model={**model, "merges": model["merges"][:-1]}) != digest
    first, second = list(vocabulary)[:2]
    swapped = {**vocabulary, first: vocabulary[second], second: vocabulary[first]}
    assert changed(model={**model, "vocab": swapped}) != digest
    without_first = {token: number for token, number in vocabulary.items() if number != 0}
    assert changed(model={**model, "vocab": without_first}) != digest
