"""`penstock program` shows sequences of the length that training has."""

import pytest
from records import byte_tokens, random_records, write_records
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.data import build_dataset

RECORDS = random_records(seed=1, count=40)
LONGEST = max(sum(map(len, byte_tokens(record))) - 1 for record in RECORDS)
CONTEXT = 256  # of the preset
CONFIG = """
model: {preset: tiny, n_layer: 1}
data:
  input: [FOLDER/records.jsonl]
  content: records
  validation: 0.2
run: {dir: FOLDER/run}
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_records(tmp_path / "records.jsonl", RECORDS)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    return tmp_path


def build(folder, content="records"):
    source = folder / "records.jsonl"
    build_dataset([source], "bytes", folder / "run" / "data", validation=0.2, content=content)


def shown(folder, *options, command=("program",)):
    """Return what is printed: the output, and notes."""
    done = CliRunner().invoke(app, [*command, str(folder / "run.yaml"), *options])
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def micro_batch(length):
    return f"one micro-batch is input_ids [1, {length}], labels [1, {length}]"


def test_records_that_are_built_are_shown_at_the_length_of_training(folder):
    build(folder)
    output, notes = shown(folder)
    assert LONGEST < CONTEXT
    assert micro_batch(LONGEST) in output
    assert notes == ""


def test_records_that_are_not_built_are_shown_at_the_context_with_a_note(folder):
    output, notes = shown(folder)
    assert micro_batch(CONTEXT) in output
    assert notes == (
        "This is for sequences of 256 tokens, the most that the model takes: the longest record is "
        "not known before the data set is built.\n"
    )


@pytest.mark.parametrize("given", [("--sequence-length", "16"), ("data.sequence_length=16",)])
def test_length_that_is_given_is_shown_whatever_the_records(given, folder):
    build(folder)
    output, notes = shown(folder, *given)
    assert micro_batch(16) in output
    assert notes == ""


def test_cycles_of_a_wafer_are_for_the_length_of_training(folder):
    known = shown(folder, "--sequence-length", str(LONGEST), command=("wafer", "layers"))
    assert known != shown(folder, command=("wafer", "layers"))
    build(folder)
    assert known == shown(folder, command=("wafer", "layers"))


def test_a_micro_batch_of_the_run_is_shown_unless_another_is_given(folder):
    run = (folder / "run.yaml").read_text() + "batch: {size: 8, micro: 4}\n"
    (folder / "run.yaml").write_text(run)
    for given, shown_size in (((), 4), (("--micro-batch", "2"), 2), (("batch.micro=auto",), 1)):
        output, _ = shown(folder, "data.sequence_length=16", *given)
        assert f"one micro-batch is input_ids [{shown_size}, 16]" in output
        assert "gradients may have more bytes than the weights" in " ".join(output.split())
