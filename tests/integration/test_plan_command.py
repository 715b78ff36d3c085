"""`penstock plan` as it is typed: the page, the tables, the files, and what it refuses."""

import csv
import json

import pytest
from command_line import penstock
from records import write_records

from penstock.config import Config
from penstock.training.trainer import Trainer

HOST = """
name: desk
title: two cores with round figures
kind: host
engine:
  is_host: true
  operator_seconds: 5e-6
  rates:
    - {work: product, rates: [100e9]}
    - {work: pointwise, rates: [10e9]}
store:
  memory: 24GiB
  cores: 2
  rates:
    - {work: update, rates: [10e9]}
"""
DISK = """
  flash:
    rates:
      - {work: flash read, rates: [1e9]}
      - {work: flash write, rates: [1e9]}
"""
TINY = ("tiny", "batch.size=8", "data.sequence_length=32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machines")
    (folder / "desk.yaml").write_text(HOST)
    (folder / "disk.yaml").write_text(HOST.rstrip() + DISK)
    return folder


def plan(folder, *arguments, machine="desk.yaml"):
    return penstock("plan", *arguments, "--machine", machine, cwd=folder)


def test_page_says_whether_it_fits_how_long_it_takes_and_what_binds_it(folder):
    done = plan(folder, *TINY)
    assert done.returncode == 0, done.stderr
    for text in (
        "on one engine of desk (two cores with round figures)",
        "It fits: ",
        "One step takes",
        "not compared with measured runs",
        "What binds the forward sweep: compute",
        "weights to each engine",
        "As training decides: ",
    ):
        assert text in done.stdout


def test_json_has_the_same_as_numbers(folder):
    found = json.loads(plan(folder, *TINY, "--json").stdout)
    assert found["machine"] == "desk"
    assert found["micro_batch"] * found["micro_batches"] == found["batch_size"] == 8
    assert found["tokens_per_second"] == pytest.approx(8 * 32 / found["step_seconds"])
    assert found["run_seconds"] == pytest.approx(1000 * found["step_seconds"])
    assert found["step_seconds_interval"] is None
    assert sum(found["memory_bytes"].values()) <= found["memory_limit_bytes"]


def test_step_on_one_thread_is_the_sum_of_its_parts(folder):
    found = json.loads(plan(folder, *TINY, "--json").stdout)
    assert sum(found["busy"]["step"].values()) == pytest.approx(1.0)


def test_store_on_flash_is_read_and_written(folder):
    more = ("store.flash.path=flash", "store.dram=64MiB", "--json")
    found = json.loads(plan(folder, *TINY, *more, machine="disk.yaml").stdout)
    assert found["flash_written_bytes"] > 0
    assert not (folder / "flash").exists()


def test_engines_of_a_wafer_cluster_share_a_batch(folder):
    more = ("--json", "batch.size=64", "batch.micro=1")
    one, many = (
        json.loads(plan(folder, *TINY, *more, f"engines={count}", machine="cs2").stdout)
        for count in (1, 16)
    )
    assert one["stream_bytes"] == many["stream_bytes"]  # a fabric broadcasts
    assert 1 < many["tokens_per_second"] / one["tokens_per_second"] <= 16


@pytest.mark.long
def test_sweep_is_a_table_a_csv_file_and_a_picture(folder):
    more = ("--sweep", "batch.size=8..32", "--csv", "sweep.csv", "--plot", "sweep.svg")
    done = plan(folder, *TINY, *more)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    assert [row["batch.size"] for row in rows] == ["8", "16", "32"]
    steps = [float(row["step_seconds"]) for row in rows]
    assert steps == sorted(steps)
    assert "<svg" in (folder / "sweep.svg").read_text()
    assert all(f" {row['batch.size']} " in done.stdout for row in rows)
    assert "batch.size=8..32 doubles; batch.size=8..32+N adds N\n" in done.stdout


def test_machines_are_compared_in_a_table(folder):
    done = penstock("plan", *TINY, "--machine", "desk.yaml", "--machine", "cs3", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "desk" in done.stdout
    assert "cs3" in done.stdout
    assert "memory of an engine" in done.stdout


def test_sweep_says_that_measured_runs_took_longer_than_predicted(folder):
    accuracy = "accuracy: {low: 2.1, high: 24, runs: 13, source: runs.jsonl}\n"
    (folder / "far.yaml").write_text(HOST + accuracy)
    done = plan(folder, *TINY, "--sweep", "batch.size=8..16", machine="far.yaml")
    text = " ".join(done.stdout.split())
    note = "runs took 2.10 to 24 times as long as predicted"
    assert text.count(f"{note}.") == 1
    done = plan(folder, *TINY, "--sweep", "batch.size=8..16", "--json", machine="far.yaml")
    assert all(note in json.loads(line)["accuracy_note"] for line in done.stdout.splitlines())


def test_fewest_engines_for_a_deadline(folder):
    more = ("batch.size=64", "batch.micro=1", "run.steps=1000000", "--json")
    one = json.loads(plan(folder, *TINY, *more, machine="hosts-10g").stdout)
    wanted = one["run_seconds"] / 1.5 / 3600
    done = plan(folder, *TINY, *more, "--target", f"{wanted:.3f} hours", machine="hosts-10g")
    found = json.loads(done.stdout)
    assert found["engines"] > 1
    assert found["run_seconds"] <= wanted * 3600
    done = plan(folder, *TINY, *more[:-1], "--target", f"{wanted:.3f} hours", machine="hosts-10g")
    answer = (
        f"--target: {found['engines']} engines are the fewest of hosts-10g to end the run within "
    )
    assert answer in " ".join(done.stdout.split())


def test_picture_of_a_step(folder):
    done = penstock(
        "plan", "figure", "timing", *TINY, "--machine", "desk.yaml", "--out", "t.png", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "t.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout == "t.png: one step of tiny: weights, compute, gradients, updates\n"


@pytest.mark.parametrize(("option", "returncode"), [("--help", 0), ("--hlp", 2)])
def test_usage_of_a_plan_names_no_command_below_plan(option, returncode):
    done = penstock("plan", *TINY, option)
    assert done.returncode == returncode
    assert "Usage: penstock plan [OPTIONS] {CONFIG}" in done.stdout + done.stderr
    assert "plan run" not in done.stdout + done.stderr


def test_records_are_planned_as_they_train(folder, tmp_path):
    """Before the data set is built, the plan says that the length of its sequences is unknown."""
    records = [(f"{number} and {number} are", f" {2 * number}") for number in range(40)]
    file = write_records(tmp_path / "sums.jsonl", records)
    config = [
        "tiny",
        f"data.input=[{file}]",
        "data.content=records",
        "batch.size=8",
        "engine.threads=1",
        f"run.dir={tmp_path / 'run'}",
        "run.steps=1",
    ]
    note = "data.sequence_length: the longest record is not known before the data set "
    first = plan(folder, *config, "--json")
    found = json.loads(first.stdout)
    assert found["sequence_length"] == 256
    assert found["sequence_length_note"].startswith(note)
    assert f"note: {note}" in first.stderr
    swept = plan(folder, *config, "--sweep", "batch.micro=1,2", "--json")
    assert all(
        note in json.loads(line)["sequence_length_note"]
        for line in swept.stdout.split("\n")
        if line
    )
    assert swept.stderr.count(note) == 1

    trainer = Trainer(Config.from_mapping({"model": "tiny"}, config[1:]), quiet=True)
    trainer.train()
    again = plan(folder, *config, "--json")
    found = json.loads(again.stdout)
    rows = trainer.program.values["input_ids"].tensor.shape
    assert (found["micro_batch"], found["sequence_length"]) == tuple(rows)
    assert found["sequence_length"] < 256
    assert found["sequence_length_note"] is None
    assert note not in again.stderr


@pytest.mark.long
def test_picture_of_a_step_says_that_the_longest_record_is_unknown(folder):
    more = ("data.content=records", "--machine", "desk.yaml", "--out", "r.png")
    done = penstock("plan", "figure", "timing", "tiny", *more, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "note: data.sequence_length: the longest record is not known" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("tiny", "--sweep", "engines"), "--sweep: expected KEY=VALUES such as engines=1..192"),
        (("tiny", "--csv", "a.csv"), "--csv: expected --sweep beside it, got none"),
        (("tiny", "--target", "soon"), "--target: expected a duration such as '3 days'"),
        (
            ("tiny", "batch.size=256", "engines=193"),
            "engines: cs2 has at most 192 engines, got 193",
        ),
        (("figure", "memry"), "expected a figure, one of memory, scaling, timing, gpus"),
        (("figure", "timing"), "timing: expected a configuration"),
        (("figure", "memory", "tiny"), "memory: expected no configuration, got 'tiny'"),
    ],
)
def test_wrong_arguments_are_refused(folder, arguments, text):
    done = plan(folder, *arguments, machine="cs2")
    assert done.returncode != 0
    assert text in done.stderr


def test_unknown_machine_is_refused_with_the_nearest_name(folder):
    done = plan(folder, "tiny", machine="cs4")
    assert done.returncode != 0
    assert "expected a machine (cs2, cs3, " in done.stderr
    assert "did you mean" in done.stderr


def test_run_on_flash_needs_a_machine_with_a_disk(folder):
    done = plan(folder, *TINY, "store.flash.path=flash")
    assert done.returncode != 0
    assert "store.flash.path: the machine desk has no disk" in done.stderr


def test_run_that_does_not_fit_is_refused_with_the_sum(folder):
    done = plan(folder, *TINY, "memory=600MiB")
    assert done.returncode != 0
    assert "memory: 600MiB cannot hold this run" in done.stderr
    assert "store " in done.stderr


def test_gpu_cluster_shows_its_best_division(folder):
    done = penstock("plan", *TINY, "engines=2", "--machine", "a100-cluster", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "on 2 GPUs of a100-cluster" in done.stdout
    assert "The best division: tensor " in done.stdout
    assert "One step takes" in done.stdout


def test_machines_and_gpu_clusters_are_compared_in_one_table(folder):
    done = penstock(
        "plan", *TINY, "--machine", "desk.yaml", "--machine", "h100-cluster", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "desk" in done.stdout
    assert "h100-cluster" in done.stdout


def test_gpu_cluster_as_json_and_with_a_deadline(folder):
    done = penstock(
        "plan", *TINY, "--machine", "v100-cluster", "--target", "1 hour", "--json", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpus"] == 1
    assert found["run_seconds"] <= 3600
    assert sum(found["parts"].values()) == pytest.approx(found["step_seconds"])


@pytest.mark.long
def test_model_that_no_gpu_can_hold_is_refused_with_the_fewest_that_can(folder):
    done = penstock(
        *("plan", "gpt3-6.7b", "batch.size=64", "precision=bf16", "engines=1"),
        *("--machine", "v100-cluster"),
        cwd=folder,
    )
    assert done.returncode == 5
    assert "no division of gpt3-6.7b with batch.size 64 among 1 GPUs of v100-cluster" in done.stderr
    assert "the fewest GPUs that do are " in done.stderr


def test_unknown_machine_is_told_the_machines_and_the_clusters(folder):
    done = penstock("plan", *TINY, "--machine", "a100-clutser", cwd=folder)
    assert done.returncode == 2
    assert "did you mean 'a100-cluster'?" in done.stderr
    assert "cs2, cs3, h100, h200" in done.stderr


@pytest.mark.long
def test_steps_with_dense_gradients_are_said_to_take_longer(folder):
    sparse = ("sparsity.method=rigl", "sparsity.sparsity=0.5", "run.steps=1000")
    done = plan(folder, *TINY, *sparse, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["dense_step_seconds"] > found["step_seconds"]
    assert found["run_seconds"] > 1000 * found["step_seconds"]
    page = plan(folder, *TINY, *sparse)
    assert "compute the gradients of absent entries too" in page.stdout
