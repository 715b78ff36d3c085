"""Training on prompts with completions: against `transformers`, which is given one record a time.

There, nothing is padded: a record's tokens go in as they are, with labels of -100 on the prompt.
"""

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from grids import quick_first
from plain_training import Recipe, distance, plain, streamed
from records import END, byte_tokens, write_records
from tiny_models import FIELDS, IGNORED, LENGTH, language_model, with_rows
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config import load
from penstock.data import TokenDataset, build_dataset
from penstock.errors import DataError
from penstock.telemetry.events import Evaluated, Notice, StepDone
from penstock.telemetry.metrics_writer import read_metrics
from penstock.training.trainer import Trainer

STEPS, RATE = 8, 3e-3
ROOT = Path(__file__).parents[2]


def questions(count):
    """Sums, whose completions differ in length: some tokens of them are easy, others are not."""
    rng = random.Random(0)
    sums = rng.sample([(a, b) for a in range(100) for b in range(13)], count)
    return [(f"{a} and {b} are", f" {a + b}") for a, b in sums]


def model_fields(family):
    sizes = {"n_positions": 64} if family == "gpt2" else {"max_position_embeddings": 64}
    return {"model_type": family, **FIELDS[family], **sizes, "vocab_size": 257}


def config(folder, run_dir, family="gpt2", **changes):
    """Return a run on the records of `folder`, whose every step sees all 12 that train."""
    sections = {
        "model": {"hf_config": model_fields(family)},
        "data": {"path": str(folder / "set")},
        "batch": {"size": 12, "micro": 3},
        "optimizer": {
            "learning_rate": RATE,
            "weight_decay": 0.0,
            "clip_norm": None,
            "schedule": {"name": "constant"},
        },
        "engine": {"threads": 1, "device": "cpu"},
        "run": {"dir": str(run_dir), "steps": STEPS},
        "evaluation": {"every": None},
        "checkpoint": {"every": None},
    }
    for name, value in changes.items():
        sections[name] = {**sections.get(name, {}), **value}
    return sections


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve records that train and twelve that are held out."""
    folder = tmp_path_factory.mktemp("records")
    file = write_records(folder / "all.jsonl", questions(24))
    options = {"content": "records", "validation": 0.5, "overwrite": True}
    for seed in range(100):
        build_dataset([file], "bytes", folder / "set", seed=seed, **options)
        if TokenDataset.open(folder / "set").documents("train") == 12:
            return folder
    raise AssertionError("no seed gives twelve")


def records_of(folder, split):
    """Return (tokens of the prompt, tokens of the completion) of the records in a split."""
    dataset = TokenDataset.open(folder / "set")
    tokens = dataset.read(split, 0, dataset.tokens(split))
    whole = [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == END) + 1)]
    found = [byte_tokens(record) for record in questions(24)]
    return [(prompt, completion) for prompt, completion in found if prompt + completion in whole]


def loss_of(model, prompt, completion):
    """Return the summed loss of a completion as `transformers` computes it."""
    tokens = torch.tensor([prompt + completion])
    labels = torch.tensor([[-100] * len(prompt) + completion])
    return model(input_ids=tokens, labels=labels).loss * len(completion)


def plain_model(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**model_fields(family)), dtype=torch.float32
    )


@pytest.mark.long
@pytest.mark.parametrize("family", quick_first(["gpt2", "llama"], ["llama"]))
def test_losses_and_weights_equal_transformers(family, folder, tmp_path):
    records = records_of(folder, "train")
    assert len({len(completion) for _, completion in records}) > 1, "a mean of means would differ"
    model = plain_model(family).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    expected = []
    for _ in range(STEPS):
        count = sum(len(completion) for _, completion in records)
        loss = sum(loss_of(model, *record) for record in records) / count
        loss.backward()
        expected.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    events = []
    trainer = Trainer(config(folder, tmp_path / "run", family), on_event=events.append)
    trainer.train()
    found = [event.loss for event in events if isinstance(event, StepDone)]
    assert found == pytest.approx(expected, rel=2e-5)
    assert found[-1] < 0.9 * found[0]
    trainer.store.flush()
    for name, weight in model.named_parameters():
        if name in trainer.program.weights:
            assert distance(trainer.store.master(name), weight.detach()) < 2e-3, name


@pytest.mark.long
@pytest.mark.parametrize("family", quick_first(["gpt2", "llama"], ["llama"]))
def test_accuracy_equals_argmax_of_the_exported_model(family, folder, tmp_path):
    """Of the twelve held-out records, which fill two micro-batches and half of a third."""
    from transformers import AutoModelForCausalLM

    changes = {"batch": {"micro": 5, "size": 10}, "run": {"steps": 120}}
    trainer = Trainer(config(folder, tmp_path / "r", family, **changes))
    trainer.train()
    found = trainer.evaluate(batches=100)
    trainer.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    right, whole, loss = [], [], 0.0
    with torch.no_grad():
        for prompt, completion in records_of(folder, "validation"):
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
            said = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            same = [a == b for a, b in zip(said, completion, strict=True)]
            right += same
            whole.append(all(same))
            loss += float(loss_of(model, prompt, completion))
    assert 0 < sum(right) < len(right)
    assert found["accuracy"] == sum(right) / len(right)
    assert found["exact_match"] == sum(whole) / 12
    assert (found["tokens"], found["records"]) == (len(right), 12)
    assert found["loss"] == pytest.approx(loss / len(right), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss / len(right)), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("family", quick_first(["gpt2", "bert"], ["bert"]))
def test_accuracy_on_text_is_over_labelled_tokens(family, tmp_path):
    case, recipe = language_model(family), Recipe(steps=40, warmup_steps=0)
    trainer = Trainer(
        recipe.config(tmp_path, evaluation={"every": 20}),
        model=case.source(0),
        source=case.data(0),
        held_out=case.data(0),
        on_event=(events := []).append,
    )
    trainer.train()
    found = trainer.evaluate(batches=100)
    model = case.plain(0).eval()
    weights = {name: trainer.store.master(name) for name in trainer.program.weights}
    model.load_state_dict(weights, strict=False)
    rows = {name: torch.from_numpy(value) for name, value in case.arrays(0).items()}
    labels = rows.pop("labels")
    with torch.no_grad():
        right = model(**rows).logits.argmax(-1) == labels
    share = float(right[labels != IGNORED].double().mean())
    assert 0 < share < 1
    assert found["accuracy"] == share
    assert "exact_match" not in found
    told = [event.accuracy for event in events if isinstance(event, Evaluated)]
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["event"] == "evaluation"]
    assert [row["accuracy"] for row in rows] == told
    assert [row["exact_match"] for row in rows] == [None, None]


@pytest.mark.long
def test_interrupted_records_run_resumes_to_the_same_bits(folder, tmp_path):
    """With batches that straddle epochs: five rows of twelve."""
    changes = {"batch": {"size": 5, "micro": 1}, "run": {"steps": 9}}
    straight = Trainer(config(folder, tmp_path / "a", **changes))
    straight.train()
    first = Trainer(config(folder, tmp_path / "b", **changes))
    first._listener = lambda event: (
        first.request_stop() if isinstance(event, StepDone) and event.step == 4 else None
    )
    first.train()
    assert first.step == 4
    second = Trainer(config(folder, tmp_path / "b", **changes))
    assert second.resumed_from == 4
    second.train()
    assert second.step == 9
    assert second.store.content_hash() == straight.store.content_hash()


@pytest.mark.long
def test_padding_changes_nothing_but_rounding(folder, tmp_path):
    losses = {}
    for length in (None, 40):
        events = []
        run = tmp_path / str(length)
        trainer = Trainer(
            config(folder, run, data={"sequence_length": length}), on_event=events.append
        )
        trainer.train()
        longest = max(sum(map(len, record)) for record in records_of(folder, "train"))
        longest = max(longest, max(sum(map(len, r)) for r in records_of(folder, "validation")))
        shape = trainer.program.values["input_ids"].tensor.shape
        assert shape == (3, length or longest - 1)
        losses[length] = [event.loss for event in events if isinstance(event, StepDone)]
        said = [event.text for event in events if isinstance(event, Notice)]
        assert said[0].startswith(
            f"train split of {folder / 'set'}: 12 records in rows of {shape[1]}"
        )
    assert losses[None] == pytest.approx(losses[40], rel=2e-5)


@pytest.mark.long
def test_micro_batch_without_labels_does_not_count(tmp_path):
    case = language_model("gpt2")

    def arrays(seed):
        rows = {name: value[:4].copy() for name, value in case.arrays(seed).items()}
        rows["labels"][1] = IGNORED
        rows["labels"][2, : LENGTH // 2] = IGNORED
        return rows

    some = with_rows(case, arrays(0))
    recipe = Recipe(steps=6, size=4, micro=1)
    ours, theirs = streamed(some, recipe, tmp_path), plain(some, recipe)
    assert ours.losses == pytest.approx(theirs.losses, rel=2e-5)
    for name, weight in ours.weights.items():
        assert distance(weight, theirs.weights[name]) < 1e-3, name


# What is refused, and what is said


def test_the_command_line_builds_and_shows_records(tmp_path):
    records = [("a" * 6, "b" * 3), ("a", "b" * 4), ("ab", "c")]
    file = write_records(tmp_path / "a.jsonl", records, "q", "a")
    out = str(tmp_path / "set")
    flags = ["--content", "records", "--prompt-field", "q", "--completion-field", "a"]
    build = ["data", "build", "--input", str(file), "--tokenizer", "bytes", "--out", out]
    done = CliRunner().invoke(app, [*build, *flags, "--validation", "0"])
    assert done.exit_code == 0, done.output
    line = "train        20 tokens, 3 records of at most 10 (55% completion), 1 shard"
    assert line in done.output.splitlines()
    assert line in CliRunner().invoke(app, ["data", "inspect", out]).output.splitlines()


def test_masked_models_refuse_records(folder, tmp_path):
    with pytest.raises(DataError) as error:
        Trainer(config(folder, tmp_path, "bert"))
    assert str(error.value) == (
        f"{folder / 'set'} holds prompts with completions, for next-token prediction (task "
        "causal_lm); bert is trained for masked_lm: build a data set of plain text for it"
    )


def test_records_content_with_text_data_set_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("water " * 100)
    build_dataset([tmp_path / "a.txt"], "bytes", tmp_path / "set")
    with pytest.raises(DataError) as error:
        Trainer(config(tmp_path, tmp_path / "run", data={"content": "records"}))
    assert str(error.value) == (
        f"data.content: expected a data set of records, {tmp_path / 'set'} holds plain text; set "
        "data.path to another folder, where Penstock builds one, or set data.content: text"
    )


@pytest.mark.long
def test_recipe_answers_unseen_prompts(tmp_path, monkeypatch):
    """In 100 of its steps, by the command line as a user would."""
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    settings = load(
        "recipes/finetune-tiny.yaml",
        [f"run.dir={run}", "run.steps=100", "evaluation.every=null", "engine.threads=1"],
    )
    trainer = Trainer(settings)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert before["accuracy"] < 0.1
    assert before["exact_match"] == 0
    assert after["accuracy"] > 0.8
    assert after["exact_match"] > 0.2
    done = CliRunner().invoke(app, ["eval", str(run)])
    assert done.output == (
        f"step 100  loss {after['loss']:.4f} nats per token  "
        f"perplexity {after['perplexity']:.4g}  accuracy {after['accuracy']:.1%}  "
        f"exact match {after['exact_match']:.1%}  "
        f"({after['tokens']:,} tokens of all {after['held_out_records']:,} held-out records)\n"
    )


def test_model_without_a_maximum_length_generates(folder, tmp_path):
    bloom = {"model_type": "bloom", "n_layer": 1, "hidden_size": 32, "n_head": 2, "vocab_size": 257}
    settings = config(folder, tmp_path, model={"hf_config": bloom}, run={"steps": 1})
    trainer = Trainer(settings, quiet=True)
    try:
        trainer.train()
        assert trainer.model.max_sequence_length is None
        "".join(trainer.generate("1 and 2 are", max_new_tokens=5, temperature=0))
        assert list(trainer._tokens._windows) == [16]
    finally:
        trainer.close()
