"""Sparse weights through the command line: train, inspect, evaluate, generate, export, prune."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import yaml
from command_line import penstock
from safetensors.torch import load_file
from sparse_choices import chosen

from penstock.config import load_run
from penstock.models import ModelSource
from penstock.telemetry import read_metrics
from penstock.training import Trainer

SPARSITY = {"method": "rigl", "sparsity": 0.8, "update_every": 3, "update_end": 9}
MODEL = {"preset": "tiny", "vocab_size": 257, "n_layer": 2, "n_embd": 64, "n_head": 2}


def settings(folder, **changes):
    return {
        "model": {**MODEL, "n_positions": 64},
        "data": {
            "input": [str(folder / "text.txt")],
            "tokenizer": "bytes",
            "validation": 0.2,
            "sequence_length": 32,
        },
        "batch": {"size": 4},
        "optimizer": {"learning_rate": 1e-2, "schedule": {"warmup_steps": 0}},
        "sparsity": SPARSITY,
        "engine": {"threads": 1},
        "run": {"dir": str(folder / "run"), "steps": 10},
        "evaluation": {"every": 5, "batches": 1},
        "checkpoint": {"every": 5},
        "logging": {"every": 1},
        **changes,
    }


def written(folder, **changes):
    """The file of a run on a small text."""
    words = random.Random(1).choices(["water ", "weights ", "stream\n", "layers "], k=500)
    (folder / "text.txt").write_text("".join(words))
    (folder / "run.yaml").write_text(yaml.safe_dump(settings(folder, **changes)))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that was trained by the command, and what the command printed."""
    folder = tmp_path_factory.mktemp("sparse")
    with chosen():
        done = penstock("train", written(folder))
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture(autouse=True)
def measure_nothing():
    with chosen():
        yield


@pytest.mark.long
def test_log_and_metrics_have_sparsity_changes_and_arithmetic(trained):
    folder, done = trained
    assert "8 weights are sparse (rigl): " in done.stdout
    assert "sparsity 80.0" in done.stdout
    assert "entries changed at step 3" in done.stdout
    rows = [r for r in read_metrics(folder / "run" / "metrics.jsonl") if r["event"] == "step"]
    assert len(rows) == 10
    assert [row["step"] for row in rows if row["changed_entries"]] == [3, 6]
    assert all(row["sparsity"] == pytest.approx(0.8, abs=0.001) for row in rows)
    assert len({row["flops"] for row in rows if not row["changed_entries"]}) == 1


@pytest.mark.long
def test_inspect_lists_the_sparsity_of_the_weights(trained):
    folder, _ = trained
    done = penstock("inspect", folder / "run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("sparse       8 weights: "))
    assert "sparsity 80.0" in lines[at]
    assert (
        "             transformer.h.*.mlp.c_fc.weight [64 x 256], 2 weights: sparsity 80.00%, "
        "6,554 of 32,768 entries" in lines[at + 1 : at + 5]
    )
    trainer = Trainer(load_run(folder / "run"), quiet=True, must_exist=True)
    assert penstock("inspect", folder / "run", "--hash").stdout.strip() == (
        trainer.store.content_hash()
    )


def test_program_table_says_how_each_weight_is_computed(trained):
    folder, _ = trained
    done = penstock("program", folder / "run.yaml", "sparsity.weights=['*.wte.*', '*.mlp.*']")
    assert done.returncode == 0, done.stderr
    assert "sparsity" in done.stdout
    assert "sparse product" in done.stdout
    assert "80.00%" in done.stdout
    assert "masked dense, because aten.embedding reads it" in " ".join(done.stdout.split())


def test_evaluation_and_generation_use_the_sparse_weights(trained):
    folder, _ = trained
    done = penstock("eval", folder / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("  (128 of 672 held-out tokens; --batches NUMBER reads more)\n")
    whole = penstock("eval", folder / "run", "--batches", "1000")
    assert whole.stdout.endswith("  (all 672 held-out tokens)\n")
    dense = folder / "dense-eval"
    assert penstock("export", folder / "run", dense).returncode == 0
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(dense).eval()
    trainer = Trainer(load_run(folder / "run"), quiet=True, must_exist=True)
    batch = next(iter(trainer._data.held_out.evaluation_batches(4, 4)))
    rows = {name: torch.from_numpy(np.asarray(value)) for name, value in batch.items()}
    with torch.no_grad():
        logits = model(rows["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100
        )
    assert trainer.evaluate(1)["loss"] == pytest.approx(float(loss), rel=1e-5)
    written_text = penstock("generate", folder / "run", "--prompt", "water", "--max-new-tokens", 5)
    assert written_text.returncode == 0, written_text.stderr


def test_exports_dense_and_packed_have_the_weights_of_the_run(trained):
    folder, _ = trained
    for name, options in (("dense", ()), ("packed", ("--packed",))):
        done = penstock("export", folder / "run", folder / name, *options)
        assert done.returncode == 0, done.stderr
    trainer = Trainer(load_run(folder / "run"), quiet=True, must_exist=True)
    dense = load_file(folder / "dense" / "model.safetensors")
    packed = ModelSource.from_hf(folder / "packed")
    for name, weight in packed.initial_weights(0):
        master = trainer.store.master(name)
        assert torch.equal(dense[name], master), name
        assert torch.equal(weight, master), name
        mask, own = packed.mask(name), trainer.store.mask(name)
        assert (mask is None) == (own is None)
        assert mask is None or mask.same_mask(own), name


@pytest.mark.long
def test_run_on_flash_is_inspected_evaluated_and_exported_as_one_in_memory(trained, tmp_path):
    folder, _ = trained
    run = written(tmp_path, store={"flash": {"path": str(tmp_path / "flash")}})
    done = penstock("train", run)
    assert done.returncode == 0, done.stderr
    hashes, sparse, evaluated = [], [], []
    for where in (folder / "run", tmp_path / "run"):
        hashes.append(penstock("inspect", where, "--hash").stdout)
        lines = penstock("inspect", where).stdout.splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("sparse       8 weights: "))
        sparse.append(lines[at : at + 5])
        trainer = Trainer(load_run(where), quiet=True, must_exist=True)
        evaluated.append(trainer.evaluate(1)["loss"])
        trainer.close()
        done = penstock("export", where, tmp_path / "packed" / where.parent.name, "--packed")
        assert done.returncode == 0, done.stderr
    assert hashes[0] == hashes[1] != ""
    assert sparse[0] == sparse[1]
    assert evaluated[0] == evaluated[1]
    exports = [ModelSource.from_hf(path) for path in sorted((tmp_path / "packed").iterdir())]
    for name, weight in exports[0].initial_weights(0):
        mask, other = exports[0].mask(name), exports[1].mask(name)
        assert (mask is None) == (other is None)
        assert mask is None or mask.same_mask(other), name
        assert torch.equal(weight, dict(exports[1].initial_weights(0, [name]))[name]), name


@pytest.mark.long
def test_packed_export_is_fine_tuned_with_its_masks(trained, tmp_path):
    folder, _ = trained
    penstock("export", folder / "run", tmp_path / "packed", "--packed")
    run = written(
        tmp_path,
        model={"hf": str(tmp_path / "packed")},
        sparsity={"method": "static", "initial_mask": "zeros"},
    )
    done = penstock("train", run)
    assert done.returncode == 0, done.stderr
    before = Trainer(load_run(folder / "run"), quiet=True, must_exist=True).store
    after = Trainer(load_run(tmp_path / "run"), quiet=True, must_exist=True).store
    masks = {name: before.mask(name) for name in before.program.weights}
    assert sum(mask is not None for mask in masks.values()) == 8
    for name, mask in masks.items():
        assert mask is None or mask.same_mask(after.mask(name)), name
        assert not torch.equal(before.master(name), after.master(name)), name


def test_a_wrong_sparsity_is_refused_before_the_folder_is_read(tmp_path):
    done = penstock("prune", tmp_path / "absent", tmp_path / "out", "--sparsity", "80")
    assert done.returncode == 2
    assert done.stderr == (
        "error: sparsity: expected a share of absent entries from 0 to below 1, such as 0.9, got "
        "80.0\n"
    )


@pytest.mark.long
def test_a_pruned_folder_is_fine_tuned_sparse_and_dense(trained, tmp_path):
    folder, _ = trained
    penstock("export", folder / "run", tmp_path / "model")
    done = penstock("prune", tmp_path / "model", tmp_path / "pruned", "--sparsity", "0.9")
    assert done.returncode == 0, done.stderr
    assert "8 weights keep " in done.stdout
    assert "sparsity 90.0" in done.stdout
    again = penstock("prune", tmp_path / "pruned", tmp_path / "less", "--sparsity", "0.5")
    assert "of these entries are zero in" in again.stdout
    assert "of these entries are zero in" not in done.stdout
    keys = {"model": {"hf": str(tmp_path / "pruned")}}
    zeros = {"method": "static", "initial_mask": "zeros"}
    run = written(tmp_path, **keys, sparsity={**zeros, "sparsity": 0.9})
    assert penstock("train", run, "run.steps=2").returncode == 0
    wrong = penstock(
        "train", run, "sparsity.sparsity=0.5", f"run.dir={tmp_path / 'other'}", "run.steps=2"
    )
    assert wrong.returncode == 2
    assert wrong.stderr.strip().endswith(
        f"sparsity.sparsity: expected 0.9, the sparsity of the 8 weights with zeros in "
        f"{tmp_path / 'pruned'}, got 0.5; leave it out to keep theirs, or choose initial_mask: "
        "magnitude to prune them to another one"
    )
    lifted = written(tmp_path, **keys, sparsity={}, run={"dir": str(tmp_path / "d"), "steps": 2})
    assert penstock("train", lifted).returncode == 0


def test_a_completed_run_continues_with_the_overrides_that_it_names(trained):
    folder, _ = trained
    again = penstock("train", folder / "run.yaml")
    assert again.returncode == 0
    overrides = "run.steps=20 sparsity.update_begin=0 sparsity.update_end=9"
    assert overrides in " ".join(again.stdout.split())
    refused = penstock("train", folder / "run.yaml", "sparsity.sparsity=0.5")
    assert refused.returncode == 2
    assert "sparsity.sparsity: 0.8 in the run, 0.5 now" in refused.stderr


def test_a_method_that_changes_no_mask_is_named(tmp_path):
    run = written(tmp_path, sparsity={"method": "rigl", "sparsity": 0.8})
    done = penstock("train", run, "run.steps=2", "evaluation.every=null")
    assert done.returncode == 0, done.stderr
    assert (
        "sparsity: rigl changes no mask in this run of 2 steps, with a change every 100; lower "
        "sparsity.update_every" in " ".join(done.stdout.split())
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["sparsity.sparsity=1.0"],
            "sparsity.sparsity=1.0: expected a number below 1, got 1.0; for example "
            "sparsity.sparsity: 0.9",
        ),
        (
            ["sparsity.update_end=11"],
            "sparsity.update_end=11: step 11 is after the end of the run, step 10; lower it, or "
            "raise run.steps",
        ),
        (
            ["sparsity.sparsity=0.9999"],
            "sparsity: the mask of transformer.h.0.attn.c_proj.weight would keep no entry, "
            "expected at least 1; lower the sparsity, or leave this weight out of the sparse ones",
        ),
        (
            ["sparsity.weights=['*.mpl.*']"],
            "sparsity.weights",
        ),
    ],
)
def test_mistakes_are_answered_with_a_sentence(overrides, expected, tmp_path):
    done = penstock("train", written(tmp_path), *overrides)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_packed_export_of_a_dense_run_is_refused(tmp_path):
    run = written(tmp_path, sparsity={})
    assert penstock("train", run, "run.steps=1", "evaluation.every=null").returncode == 0
    done = penstock("export", tmp_path / "run", tmp_path / "out", "--packed")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"error: --packed: expected a run with sparse weights, {tmp_path / 'run'} has none "
        "(sparsity.method is null); export it without --packed"
    )
