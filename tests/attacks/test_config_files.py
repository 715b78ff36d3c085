"""Hostile YAML: one line that says what is wrong, soon and in little memory."""

import json
import os

import pytest
from bounded_memory import bounded_memory

from penstock.config import Config, load, load_run
from penstock.errors import ConfigError, StorageError
from penstock.telemetry.metrics_writer import drop_after, read_metrics

# To hang is to fail; fixtures may compile kernels first.
pytestmark = pytest.mark.timeout(30, func_only=True)


@pytest.fixture(autouse=True)
def _little_memory():
    with bounded_memory():
        yield


def bomb(levels, width, last):
    lines = [f"a0: &a0 {last}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines)


def merged(levels):
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{!!merge '<<': [*a{level - 1}, *a{level - 1}]}}")
    return "\n".join(lines)


TEXTS = {
    "a billion laughs": (bomb(10, 10, "lol"), "more than 100,000 values"),
    "a list that contains itself": ("a: &a [*a]", "more than 100,000 values"),
    "a mapping that contains itself": ("a: &a {b: *a}", "more than 100,000 values"),
    "merges that double": (merged(40), "unknown tag 'tag:yaml.org,2002:merge'"),
    "nested 100,000 deep": ("[" * 100_000, "nested too deeply"),
    "an object of Python": ("a: !!python/object/apply:os.system [id]", "unknown tag"),
    "a time": ("a: !!timestamp x", "unknown tag"),
    "an integer that is none": ("a: !!int abc", "'abc' is not an integer"),
    "an integer that is a list": ("a: !!int [1]", "expected a scalar node"),
    "a number that is none": ("a: !!float abc", "'abc' is not a number"),
    "a truth that is neither": ("a: !!bool perhaps", "'perhaps' is neither true nor false"),
    "a mapping that is a text": ("a: !!map abc", "expected a mapping"),
    "an integer of 5,000 digits": (
        "run: {steps: " + "9" * 5000 + "}",
        "yaml:1: expected whole numbers between -2^64 and 2^64, got one of 5,000 digits",
    ),
    "an integer of 399 digits": ("run: {steps: " + "9" * 399 + "}", "got one of 399 digits"),
    "a key twice": ("model: gpt2\nmodel: gpt2", "key 'model' is given twice"),
    "a key that is a list": ("[1]: 2", "a list or a mapping cannot be a key"),
    "infinity": ("optimizer: {learning_rate: .inf}", "learning_rate: expected a "),
    "no number": ("optimizer: {learning_rate: .nan}", "learning_rate: expected a "),
    "2^64": ("run: {seed: 18446744073709551616}", "got one of 20 digits"),
    "2^64 in hexadecimal": ("run: {seed: 0x10000000000000000}", "got one of 17 digits"),
    "a path with a zero byte": ('data: {path: "a\\0b"}', "zero byte"),
    "a run with a zero byte": ('run: {dir: "a\\0b"}', "zero byte"),
    "half a character": ('run: {dir: "\\ud800"}', "run.dir"),
    "two documents": ("a: 1\n--- \nb: 2", "document"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_text_that_is_not_configuration_is_refused(tmp_path, what):
    text, said = TEXTS[what]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("what", ["a billion laughs", "a list that contains itself"])
def test_expanding_override_is_refused(what):
    text = TEXTS[what][0].replace("\n", ", ")
    with pytest.raises(ConfigError, match=r"command line: .* is not valid YAML"):
        Config.from_mapping({}, [f"model={{{text}}}"])


def put_fifo(path):
    os.mkfifo(path)


def put_folder(path):
    path.mkdir()


def put_zeros(path):
    path.symlink_to("/dev/zero")


def put_a_trillion(path):
    path.touch()
    os.truncate(path, 2**40)


OTHERS = {
    "a FIFO": (put_fifo, "got a FIFO"),
    "a folder": (put_folder, "got a folder"),
    "zeros without end": (put_zeros, "got a device"),
    "a sparse file of 2^40 bytes": (put_a_trillion, "at most 16,777,216 are allowed"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_something_else_than_a_file(tmp_path, what):
    put, said = OTHERS[what]
    put(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=f"run.yaml: .*{said}"):
        load(tmp_path / "run.yaml")


def test_recorded_configuration_that_is_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"expected a run, which has a config\.yaml"):
        load_run(tmp_path)


ROWS = [
    "[" * 100_000,
    '{"step": ' + "9" * 5000 + "}",
    '{"step": true, "loss": 1}',
    '{"step": 1.5}',
    '{"step": "1"}',
    '{"step": 2, "event": "step", "loss": "abc"}',
    '{"step": 2, "event": "step", "loss": [1]}',
    "null",
    '{"step"',
    "\0\0\0",
]


def test_invalid_metrics_rows_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = {"event": "step", "step": 1, "loss": 1.5}
    path.write_text("\n".join([*ROWS, json.dumps(good), *ROWS]))
    assert read_metrics(path) == [good]
    before = path.read_text().index(json.dumps(good))
    text = path.read_text()
    assert drop_after(path, 5) == len(ROWS)  # those behind the last row that is one
    assert path.read_text() == text[:before] + json.dumps(good) + "\n"


def test_metrics_are_not_written_through_symlink(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".tmp-metrics.jsonl").symlink_to(tmp_path / "precious")
    assert drop_after(tmp_path / "metrics.jsonl", 1) == 1
    assert (tmp_path / "precious").read_text() == "mine"


def test_metrics_file_that_is_fifo_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(StorageError, match="expected a file, got"):
        read_metrics(tmp_path / "metrics.jsonl")
