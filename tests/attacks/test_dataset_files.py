"""Hostile data sets: refused by name, and nothing outside of their folder is read.

`dataset.json` is sealed again after each change, as somebody would who means harm.
"""

import json
import os
import random
import shutil

import numpy as np
import pytest
import xxhash
from bounded_memory import bounded_memory

from penstock.data import LanguageModelSource, TokenDataset, build_dataset, load_tokenizer
from penstock.data.manifest import checksum_of
from penstock.errors import CorruptionError, DataError

# To hang is to fail; fixtures may compile kernels first.
pytestmark = pytest.mark.timeout(30, func_only=True)


@pytest.fixture(autouse=True)
def _little_memory():
    with bounded_memory():
        yield


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    chosen = random.Random(1)
    texts = ["".join(chosen.choices("abcde \n", k=chosen.randint(20, 90))) for _ in range(40)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    build_dataset(
        [folder / "a.jsonl"],
        "train-bpe:270",
        folder / "set",
        validation=0.2,
        shard_bytes=1024,
        chunk_bytes=256,
    )
    return folder / "set"


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "set")


def resealed(folder, change):
    path = folder / "dataset.json"
    content = json.loads(path.read_bytes())
    del content["checksum"]
    change(content)
    path.write_text(json.dumps(content | {"checksum": checksum_of(content)}))


def shard(content):
    return content["splits"]["train"]["shards"][0]


def set_in(place, **changes):
    return lambda content: place(content).update(changes)


CHANGES = {
    "a file above": set_in(lambda c: shard(c)["data"], file="../precious"),
    "an absolute file": set_in(lambda c: shard(c)["data"], file="/etc/passwd"),
    "a file with a zero byte": set_in(lambda c: shard(c)["data"], file="a\0b"),
    "a file whose name ends in a line end": set_in(lambda c: shard(c)["data"], file="a.bin\n"),
    "itself": set_in(lambda c: shard(c)["data"], file="dataset.json"),
    "a file twice": lambda c: shard(c)["index"].update(file=shard(c)["data"]["file"]),
    "2^60 bytes": set_in(lambda c: shard(c)["data"], size_bytes=2**60),
    "a negative size": set_in(lambda c: shard(c)["data"], size_bytes=-1),
    "2^63 tokens": set_in(shard, tokens=2**63),
    "2^62 tokens": set_in(shard, tokens=2**62),
    "a number of 4,000 digits": set_in(shard, tokens=10**4000),
    "tokens that are true": set_in(shard, tokens=True),
    "tokens that are text": set_in(shard, tokens="5"),
    "chunks of no bytes": set_in(lambda c: c, chunk_bytes=0),
    "chunks of 7 bytes": set_in(lambda c: c, chunk_bytes=7),
    "chunks of 2^60 bytes": set_in(lambda c: c, chunk_bytes=2**60),
    "one checksum too few": lambda c: shard(c)["data"]["chunks"].pop(),
    "one checksum too many": lambda c: shard(c)["data"]["chunks"].append("0" * 32),
    "no train split": lambda c: c["splits"].pop("train"),
    "another split": lambda c: c["splits"].update(other=c["splits"]["train"]),
    "no vocabulary": set_in(lambda c: c, vocab_size=0),
    "a vocabulary beyond its type": set_in(lambda c: c, vocab_size=2**20),
    "an unknown type": set_in(lambda c: c, dtype="uint64"),
    "a share that is infinite": set_in(lambda c: c, validation_fraction=float("inf")),
    "a share that is no number": set_in(lambda c: c, validation_fraction=float("nan")),
    "shards that are a number": set_in(lambda c: c["splits"]["train"], shards=5),
    "an end beyond the vocabulary": set_in(lambda c: c["tokenizer"], end_of_document=2**40),
}


@pytest.mark.parametrize("what", CHANGES)
def test_invalid_description_is_refused(folder, tmp_path, what):
    (tmp_path / "precious").write_bytes(b"\1" * shard(description(folder))["data"]["size_bytes"])
    resealed(folder, CHANGES[what])
    with pytest.raises(CorruptionError, match=r"dataset\.json breaks the format \("):
        TokenDataset.open(folder)


def description(folder):
    return json.loads((folder / "dataset.json").read_bytes())


@pytest.mark.parametrize("version", [4, 2**63, 10**4000, "1", None])
def test_unknown_format_version_is_refused(folder, version):
    resealed(folder, set_in(lambda c: c, version=version))
    with pytest.raises(DataError, match=r"has format version .* build the data set again"):
        TokenDataset.open(folder)


@pytest.mark.parametrize("depth", [100, 490, 900, 990, 1_000, 3_000, 100_000])
def test_deeply_nested_json_is_refused(folder, depth):
    path = folder / "dataset.json"
    path.write_text(f'{{"deep": {"[" * depth}{"]" * depth}, {path.read_text()[1:]}')
    with pytest.raises(
        CorruptionError, match=r"dataset\.json (is not JSON|does not match its|is ne)"
    ):
        TokenDataset.open(folder)


def rewrite(folder, name, content):
    """Change a file's content and everything that is known of it."""

    def change(described):
        for split in described["splits"].values():
            for one in split["shards"]:
                for record in (one["data"], one["index"]):
                    if record["file"] == name:
                        chunk = described["chunk_bytes"]
                        record["chunks"] = [
                            xxhash.xxh3_128_hexdigest(content[begin : begin + chunk])
                            for begin in range(0, len(content), chunk)
                        ]

    (folder / name).write_bytes(content)
    resealed(folder, change)


@pytest.mark.parametrize("token", [270, 2**15, 2**16 - 1])
def test_token_beyond_vocabulary_is_refused(folder, token):
    """An engine would meet it in the middle of a step."""
    path = folder / "train-00000.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[200] = token
    rewrite(folder, path.name, tokens.tobytes())
    dataset = TokenDataset.open(folder)
    vocabulary = dataset.vocab_size
    dataset.read("train", 0, 100)
    with pytest.raises(CorruptionError) as caught:
        dataset.read("train", 199, 203)
    assert f"holds token {token} between byte 256 and 512, the vocabulary ends at " in str(
        caught.value
    )
    assert token >= vocabulary
    with pytest.raises(CorruptionError, match=f"holds token {token}"):
        for _ in LanguageModelSource(dataset, "train", 16).evaluation_batches(4):
            pass


ENDS = {
    "falling": lambda e: e[::-1],
    "one twice": lambda e: np.repeat(e, 2)[: len(e)],
    "from zero": lambda e: e - e[0],
    "beyond the tokens": lambda e: np.append(e[:-1], 2**40),
    "beyond 2^63": lambda e: np.append(e[:-1], 2**64 - 1),
}


@pytest.mark.parametrize("what", ENDS)
def test_invalid_document_ends_are_refused(folder, what):
    path = folder / "train-00000.idx"
    rewrite(folder, path.name, ENDS[what](np.fromfile(path, "<u8")).astype("<u8").tobytes())
    dataset = TokenDataset.open(folder, verify=True)
    with pytest.raises(CorruptionError, match="expected ends of documents that rise from 1 to"):
        dataset.document_ends("train")


def put_fifo(path):
    os.mkfifo(path)


def put_folder(path):
    path.mkdir()


def put_zeros(path):
    path.symlink_to("/dev/zero")


def put_nothing(path):
    path.write_bytes(b"")


def put_a_trillion(path):
    path.touch()
    os.truncate(path, 2**40)


OTHERS = {
    "a FIFO": put_fifo,
    "a folder": put_folder,
    "zeros without end": put_zeros,
    "an empty file": put_nothing,
    "a sparse file of 2^40 bytes": put_a_trillion,
}


@pytest.mark.parametrize("name", ["dataset.json", "train-00000.bin", "train-00000.idx"])
@pytest.mark.parametrize("what", OTHERS)
def test_something_else_where_a_file_was_expected(folder, name, what):
    (folder / name).unlink()
    OTHERS[what](folder / name)
    with pytest.raises(CorruptionError, match=name):
        TokenDataset.open(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("what", OTHERS)
def test_something_else_where_a_tokenizers_file_was_expected(folder, tmp_path, name, what):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    shutil.copy(folder / "tokenizer.json", tokenizer)
    (tokenizer / name).unlink(missing_ok=True)
    OTHERS[what](tokenizer / name)
    with pytest.raises(DataError, match=name):
        load_tokenizer(str(tokenizer))


def test_token_id_that_needs_memory_is_refused(folder, tmp_path):
    """The library has a slot for every id below the largest, and aborts where there is no room."""
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content["model"]["vocab"]["&"] = 2**31 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    match = "has a token with id 2147483647; expected ids below 16777216"
    with pytest.raises(DataError, match=match):
        load_tokenizer(str(tmp_path))


def test_files_of_two_data_sets_are_not_mixed(folder):
    shutil.copy(folder / "train-00001.bin", folder / "train-00000.bin")
    with pytest.raises(CorruptionError, match=r"train-00000\.bin is corrupt between .* checksum"):
        TokenDataset.open(folder, verify=True)
