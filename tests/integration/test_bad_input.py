"""Mistakes and damage, as the command line answers them: one sentence, its exit code, no traceback.

The command runs in this process, from the text of a configuration to the text on stderr.
"""

import errno
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from penstock.cli import main
from penstock.io import durable

SETTINGS = {
    "model": {"preset": "tiny", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16},
    "data": {"path": "set"},
    "batch": {"size": 4, "micro": 2},
    "optimizer": {"learning_rate": 1e-2, "schedule": {"warmup_steps": 1}},
    "engine": {"threads": 1},
    "run": {"dir": "run", "steps": 4},
    "evaluation": {"every": None},
    "checkpoint": {"every": 2},
}


@pytest.fixture
def penstock(tmp_path, monkeypatch, capsys):
    """Return the command as a function of its arguments: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    words = random.Random(0).choices(["water", "weights", "stream", "layer", "\n"], k=2000)
    Path("text.txt").write_text(" ".join(words))
    Path("run.yaml").write_text(yaml.safe_dump(SETTINGS))

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    build = ("data", "build", "--input", "text.txt", "--tokenizer", "bytes", "--out", "set")
    assert command(*build, "--validation", "0.2", "--quiet") == (0, "", "")
    return command


def assert_refused(result, code, pattern):
    """The exit code, and the whole of stderr: nothing may bury the sentence."""
    assert result[0] == code
    assert re.fullmatch(pattern, result[2].removeprefix("error: ").rstrip("\n")), result[2]


def test_unknown_key(penstock):
    assert_refused(
        penstock("train", "run.yaml", "batch.sise=3"),
        2,
        r"command line, batch\.sise=3: unknown key \(did you mean 'size'\?\); batch "
        r"has size, micro",
    )


@pytest.mark.long
def test_refused_budget_names_the_minimum_that_works(penstock):
    result = penstock("train", "run.yaml", "engine.memory=100KB")
    assert_refused(
        result,
        5,
        r"the engine needs (\S+) MiB for a step of 2 micro-batches, the budget is 97\.66 KiB; "
        r"the peak is at stage \S+\. Raise engine\.memory to at least \1 MiB, or lower "
        r"batch\.micro, batch\.size or data\.sequence_length\.",
    )
    assert not Path("run/checkpoints").exists()  # refused before the first step
    least = re.search(r"at least (\S+) MiB", result[2])[1]
    assert penstock("train", "run.yaml", f"engine.memory={least}MiB", "--quiet")[0] == 0


def test_missing_data(penstock):
    assert_refused(
        penstock("train", "run.yaml", "data.path=sat"),
        2,
        r"command line, data\.path=sat: sat does not exist; make it with `penstock "
        r"data build --input FILES --tokenizer bytes --out sat`, or list files in data\.input",
    )


def test_data_set_of_another_tokenizer_is_refused(penstock):
    ours = ("train", "run.yaml", "data.path=null", "data.input=[text.txt]", "model.vocab_size=300")
    assert penstock(*ours, "data.tokenizer=train-bpe:300", "--quiet")[0] == 0
    assert_refused(
        penstock(*ours, "data.tokenizer=bytes"),
        3,
        r"data\.tokenizer: run/data was built with train-bpe:300, got bytes; set it back, or "
        r"choose another run\.dir",
    )


@pytest.mark.long
def test_data_set_of_another_text_is_refused(penstock):
    """The run's own data set is built once; what it was not built from is never trained on."""
    Path("other.txt").write_text("other words\n" * 200)
    ours = ("train", "run.yaml", "data.path=null", "--quiet")
    assert penstock(*ours, "data.input=[text.txt]")[0] == 0
    back, other = "set it back,", "or choose another run\\.dir"
    assert_refused(
        penstock(*ours, "data.input=[other.txt]"),
        3,
        rf"data\.input: run/data was built from text\.txt, got other\.txt; {back} {other}",
    )
    assert_refused(
        penstock(*ours, "data.input=[text.txt]", "data.validation=0.2"),
        3,
        rf"data\.validation: run/data was built with 0\.05, got 0\.2; {back} {other}",
    )
    shutil.rmtree("run/checkpoints")  # which would refuse another order of sequences before
    assert_refused(
        penstock(*ours, "data.input=[text.txt]", "data.seed=1"),
        3,
        r"data\.seed: run/data was built with 0, got 1; "
        rf"{back} delete run/data to have it built again, {other}",
    )
    # The same file by another name, and one that has gone since, are no other text.
    whole = str(Path("text.txt").absolute())
    assert penstock(*ours, f"data.input=[{whole}]")[0] == 0
    Path("text.txt").rename("gone.txt")
    assert penstock(*ours, "data.input=[text.txt]")[0] == 0
    Path("run/data/built_from.json").write_text('{"input": ["text.txt"]}')
    assert_refused(
        penstock(*ours, "data.input=[text.txt]"),
        6,
        r"run/data/built_from\.json does not match its checksum; restore the file from a copy, or "
        r"delete it: the data set itself is whole without it",
    )
    Path("run/data/built_from.json").unlink()  # as of an older release
    assert penstock(*ours, "data.input=[other.txt]")[0] == 0


def test_text_that_has_changed_is_a_note_that_says_how_to_train_on_it(penstock):
    """No data set of an earlier start is deleted: another process may train on it, and the new text
    may be wrong."""
    ours = ("train", "run.yaml", "data.path=null", "data.input=[text.txt]", "data.tokenizer=bytes")
    text = Path("text.txt").read_text()
    Path("text.txt").write_text(text[:10])  # too short
    build = ("data", "build", "--input", "text.txt", "--tokenizer", "bytes", "--out", "run/data")
    assert penstock(*build, "--quiet")[0] == 0
    changed = "the files of data.input have changed since run/data was built, and the run takes"
    Path("text.txt").write_text(text)
    code, out, err = penstock(*ours)
    assert code == 3
    assert "add text" in err
    shown = " ".join((out + err).split())
    assert f"{changed} the text as it was. To train on the new text, delete run/data" in shown
    shutil.rmtree("run/data")
    code, out, err = penstock(*ours)
    assert code == 0
    assert changed not in " ".join((out + err).split())
    built = Path("run/data/dataset.json").read_bytes()
    Path("text.txt").write_text(text + "water" * 100)
    code, out, err = penstock(*ours, "run.steps=6", "optimizer.schedule.decay_steps=4")
    assert code == 0
    shown = " ".join((out + err).split())
    assert f"{changed} the text as it was. To train on the new text, choose another run" in shown
    assert Path("run/data/dataset.json").read_bytes() == built


def test_text_of_the_same_name_elsewhere_has_not_changed(penstock, tmp_path, monkeypatch):
    run = f"run.dir={tmp_path / 'run'}"
    ours = ("train", str(tmp_path / "run.yaml"), "data.path=null", "data.input=[text.txt]", run)
    assert penstock(*ours, "--quiet")[0] == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "text.txt").write_text("other")
    monkeypatch.chdir(elsewhere)
    code, out, err = penstock(*ours)
    assert code == 0
    assert "have changed" not in out + err


def test_vocabulary_mismatch(penstock):
    assert_refused(
        penstock("train", "run.yaml", "model.vocab_size=100"),
        3,
        r"data set set has token ids up to 256 \(vocabulary 257\), model has vocab_size 100; set "
        r"the model's vocab_size to 257 or more, or build the data set again with the model's "
        r"tokenizer",
    )


@pytest.mark.parametrize(
    ("setting", "code", "pattern"),
    [
        (
            "model.vocab_size=100",
            3,
            r"data\.tokenizer: bytes has token ids up to 256 \(vocabulary 257\), model has "
            r"vocab_size 100; set the model's vocab_size to 257 or more, or take the model's "
            r"tokenizer",
        ),
        ("engine.memory=1KiB", 5, r"the engine needs (?s:.*)"),
    ],
)
def test_run_that_cannot_be_executed_is_refused_before_its_data_set_is_built(
    penstock, setting, code, pattern
):
    built_here = ("data.path=null", "data.input=[text.txt]", "data.tokenizer=bytes")
    assert_refused(penstock("train", "run.yaml", *built_here, setting), code, pattern)
    assert not Path("run/data").exists()


def test_records_are_read_before_a_run_of_unknown_length_is_refused(penstock):
    """The sequence length is that of the longest record."""
    built_here = ("data.path=null", "data.input=[text.txt]", "data.tokenizer=bytes")
    records = ("data.content=records", "data.sequence_length=null", "engine.memory=1KiB")
    code, _, error = penstock("train", "run.yaml", *built_here, *records)
    assert code == 3
    assert "text.txt: prompts with completions come from .jsonl and .parquet files" in error


def test_tokenizer_that_may_get_too_many_ids_is_a_note(penstock):
    """A text with few words gives a tokenizer of fewer ids than were asked for."""
    built_here = ("data.path=null", "data.input=[text.txt]", "data.tokenizer=train-bpe:2000")
    code, out, _ = penstock("train", "run.yaml", *built_here, "model.vocab_size=1000")
    assert code == 0
    assert (
        "note: data.tokenizer: train-bpe:2000 gets up to 2000 ids from the text, the model has "
        "vocab_size 1000: the run is refused if they are more; set data.tokenizer to "
        "train-bpe:1000, or the model's vocab_size to 2000\n"
    ) in out


def test_corrupt_shard(penstock):
    shard = Path("set/train-00000.bin")
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    shard.write_bytes(damaged)
    assert_refused(
        penstock("train", "run.yaml", "--quiet"),
        6,
        r"set/train-00000\.bin is corrupt between byte 0 and \d+: checksum [0-9a-f]{32}, expected "
        r"[0-9a-f]{32}; restore the file from a copy, or build the data set again: delete set, "
        r"then run `penstock data build`, or `penstock train` if data\.input names the text",
    )
    shard.write_bytes(damaged[:-3])
    size = len(damaged)
    assert_refused(
        penstock("train", "run.yaml", "--quiet"),
        6,
        rf"set/train-00000\.bin is cut short: {size - 3} bytes, expected {size}; restore the file "
        r"from a copy, or build the data set again: delete set, then run .*",
    )


def test_commands_that_read_no_training_text_work_beside_a_damaged_shard(penstock):
    assert penstock("train", "run.yaml", "--quiet")[0] == 0
    shard = Path("set/train-00000.bin")
    shard.write_bytes(shard.read_bytes() + b"x")
    assert penstock("train", "run.yaml", "run.dir=again", "--quiet")[0] == 6
    code, said, _ = penstock("generate", "run", "--prompt", "water", "--max-new-tokens", "3")
    assert (code, said[:5]) == (0, "water")
    assert penstock("eval", "run")[0] == 0
    assert penstock("export", "run", "out")[0] == 0
    held_out = Path("set/validation-00000.bin")
    held_out.write_bytes(held_out.read_bytes()[:-2])
    assert penstock("eval", "run")[0] == 6


def test_corrupt_checkpoint(penstock):
    assert penstock("train", "run.yaml", "run.steps=4", "--quiet")[0] == 0
    (damaged,) = Path("run/checkpoints/step-00000004").glob("stage-00001*.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    text = (
        rf"{damaged}: damaged in bytes 0 to [\d,]+, which hold the header, \S+.*: expected "
        r"checksum [0-9a-f]{32}, got [0-9a-f]{32}; use another checkpoint: without a store on "
        r"flash, `penstock inspect RUN --repair` goes back to the newest intact one"
    )
    assert_refused(penstock("eval", "run"), 6, text)
    assert_refused(penstock("generate", "run", "--prompt", "water"), 6, text)
    assert_refused(penstock("export", "run", "out"), 6, text)
    assert not Path("out").exists()


def test_full_disk_while_saving_keeps_the_previous_checkpoint(penstock, monkeypatch):
    """The checkpoint before stays in force, nothing half-written is left, and the run goes on."""
    assert penstock("train", "run.yaml", "--quiet")[0] == 0
    whole = penstock("inspect", "run", "--hash")[1]
    written, write = [], durable.write

    def filling(descriptor, data):
        written.append(len(data))
        if sum(written) > 700_000:  # in the middle of the second checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(durable, "write", filling)
    assert_refused(
        penstock("train", "run.yaml", "run.dir=again", "--quiet"),
        7,
        r"again/checkpoints/step-00000004: cannot write it: No space left on device; it needs "
        r"[\d,]+ bytes, [\d,]+ bytes are free; free some space or choose another folder; what was "
        r"saved before is unchanged",
    )
    monkeypatch.setattr(durable, "write", write)
    kept = sorted(path.name for path in Path("again/checkpoints").iterdir())
    assert kept == ["index.json", "step-00000002"]
    assert penstock("train", "run.yaml", "run.dir=again", "--quiet")[0] == 0
    assert penstock("inspect", "again", "--hash")[1] == whole


def test_pattern_without_match_is_refused(penstock):
    assert_refused(
        penstock("train", "run.yaml", 'optimizer.groups=[{match: ["*.wieght"]}]'),
        2,
        r"optimizer group 1 \('\*\.wieght'\) matches none of the 28 trainable weights \(did you "
        r"mean '\*\.weight'\?\); correct the pattern or remove the group",
    )
    assert_refused(
        penstock("train", "run.yaml", "freeze=[transformer.wtf.weight]"),
        2,
        r"freeze: pattern 'transformer\.wtf\.weight' matches no weight \(did you mean "
        r"'transformer\.wte\.weight'\?\); the model's weights are named like .*",
    )


def test_changed_result_key_or_data_is_refused_on_resume(penstock):
    assert penstock("train", "run.yaml", "run.steps=2", "--quiet")[0] == 0
    assert_refused(
        penstock("train", "run.yaml", "run.steps=2", "optimizer.learning_rate=1"),
        2,
        r"run holds a run whose configuration differs in keys that decide the result:\n  "
        r"optimizer\.learning_rate: 0\.01 in the run, 1\.0 now\nset these back to resume it, or "
        r"choose another run\.dir to start a new run",
    )
    Path("text.txt").write_text("other text " * 500)
    build = ("data", "build", "--input", "text.txt", "--tokenizer", "bytes", "--out", "other")
    assert penstock(*build, "--quiet")[0] == 0
    assert_refused(
        penstock("train", "run.yaml", "run.steps=2", "data.path=other"),
        3,
        r"run was trained on another data set than other; set data\.path to the data set that the "
        r"run was started with, or choose another run\.dir",
    )


@pytest.mark.parametrize("command", [("eval", "nix"), ("generate", "nix"), ("export", "nix", "o")])
def test_missing_run_is_refused(penstock, command):
    assert_refused(
        penstock(*command), 2, r"nix: no such run; expected the folder that run\.dir named"
    )
