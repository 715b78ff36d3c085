"""Every byte in a run's folder that anyone reads is verified by `penstock inspect`.

One flipped bit in any file: `inspect` exits with 6 and names the file, or what anyone reads of that
file is as it was.
"""

import json
import random
import sys
from pathlib import Path

import pytest
import yaml
from grids import quick_first
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock import Trainer
from penstock.cli import main
from penstock.errors import CorruptionError

# Figures for people, and a file that is held while a process trains: no part of the state.
NOT_STATE = {"metrics.jsonl", "training.lock"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a Hugging Face folder, with a data set of its own and that folder's tokenizer."""
    from hf_folders import model_of, save

    folder = tmp_path_factory.mktemp("flips")
    save(model_of("gpt2"), folder / "base")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {"<|endoftext|>": 0, **{c: n for n, c in enumerate("abcdefgh", 1)}}
    assert set("abcdefgh") <= set(alphabet)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "base/tokenizer.json"))
    (folder / "text.txt").write_text("abcdefgh" * 2000)
    settings = {
        "model": {"hf": str(folder / "base")},
        "data": {"input": [str(folder / "text.txt")], "sequence_length": 8},
        "batch": {"size": 4, "micro": 2},
        "engine": {"threads": 1, "device": "cpu"},
        "run": {"dir": str(folder / "run"), "steps": 2},
        "evaluation": {"every": 1, "batches": 1},
        "checkpoint": {"every": 1},
    }
    trainer = Trainer(settings)
    trainer.train()
    trainer.close()
    return folder / "run"


def inspect(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["penstock", "inspect", str(run)])
    capsys.readouterr()
    try:
        main()
        code = 0
    except SystemExit as stopped:
        code = stopped.code or 0
    return code, *capsys.readouterr()


def files_of(run):
    return sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)


def test_intact_run_lists_verified_parts(run, monkeypatch, capsys):
    code, out, err = inspect(run, monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert f"data         {run / 'data'}  all checksums match" in out.splitlines()
    assert f"model files  {run / 'model'}  all checksums match" in out.splitlines()


@pytest.mark.parametrize("seed", quick_first(range(3), [0]))
def test_a_flipped_bit_in_any_file_is_found_and_named(run, monkeypatch, capsys, seed):
    draw = random.Random(seed)
    names = set()
    for path in files_of(run):
        if path.name in NOT_STATE:
            continue
        names.add(path.name)
        whole = path.read_bytes()
        place = draw.randrange(8 * len(whole))
        if path.name == "config.yaml":  # its last line is a comment, which nobody reads
            place = draw.randrange(8 * whole.rindex(b"\n# checksum"))
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            code, out, err = inspect(run, monkeypatch, capsys)
        finally:
            path.write_bytes(whole)
        where = f"seed {seed}, bit {place} of {path}"
        if code == 0 and path.suffix == ".json":  # in the space between two words
            assert json.loads(damaged) == json.loads(whole), where
            continue
        assert code == 6, (where, out, err)
        assert path.name in err, (where, err)
        assert "Traceback" not in err
    expected = {"config.yaml", "dataset.json", "tokenizer.json", "train-00000.bin", "config.json"}
    assert expected | {"built_from.json", "checksums.json", "index.json", "state.json"} <= names


def test_bit_flip_in_the_run_record_names_the_remedy(run, monkeypatch, capsys):
    path = run / "config.yaml"
    whole = path.read_text()
    assert yaml.safe_load(whole)["batch"]["size"] == 4
    path.write_text(whole.replace("seed: 0", "seed: 1", 1))
    try:
        code, _, err = inspect(run, monkeypatch, capsys)
        text = whole.rsplit("# checksum", 1)
        # Without its checksum it counts as written by hand.
        path.write_text(text[0])
        assert inspect(run, monkeypatch, capsys)[0] == 0
    finally:
        path.write_text(whole)
    assert code == 6
    assert err.startswith(f"error: {path} is corrupt between byte 0 and {len(text[0])}: checksum ")
    assert err.endswith(
        "; if it was edited by hand, delete its last line, else restore the file from a copy\n"
    )


def test_bit_flip_in_kept_model_files_stops_a_resume(run):
    path = run / "model" / "config.json"
    whole = path.read_text()
    fields = json.loads(whole)
    path.write_text(json.dumps({**fields, "layer_norm_epsilon": 1e-4}))
    try:
        with pytest.raises(CorruptionError) as caught:
            Trainer(Path(run / "config.yaml"))
    finally:
        path.write_text(whole)
    assert str(caught.value).startswith(f"{path} is corrupt between byte 0 and ")
    assert str(caught.value).endswith(
        "; restore the file from a copy, or from the folder that the run started from"
    )
