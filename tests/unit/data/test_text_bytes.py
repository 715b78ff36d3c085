"""The bytes of text of each split, and what a data set of an older format version has of them."""

import json
import random
import shutil

import numpy as np
import pytest
from grids import thinned
from records import random_records, write_records

from penstock.data import TokenDataset, build_dataset, packing, sources
from penstock.data.manifest import checksum_of

WORDS = ["stream", "the", "weights", "layer", "by", "through", "東京", "été\n", "🚀"]


def random_text(seed, words):
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def recorded(dataset):
    """The text bytes in `dataset.json`: of each split, and of the data set."""
    content = json.loads((dataset.path / "dataset.json").read_text())
    found = {name: split["text_bytes"] for name, split in content["splits"].items()}
    assert found == {name: dataset.text_bytes(name) for name in dataset.splits}
    return found, content["text_bytes"]


def gpt2_byte_characters():
    """The character of each byte in the vocabulary of a byte-level BPE: `bytes_to_unicode` in
    GPT-2's encoder.py."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    kept += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(b): b for b in kept} | {chr(256 + n): b for n, b in enumerate(others)}


def stored_bytes(dataset, split):
    """The text of a split as bytes, without ends of documents, from its tokens and tokenizer.json.

    A character that is cut between two splits has some of its bytes in each.
    """
    ids = dataset.read(split, 0, dataset.tokens(split)).tolist()
    ids = [one for one in ids if one != dataset.end_of_document]
    if not (dataset.path / "tokenizer.json").exists():
        return bytes(ids)
    content = json.loads((dataset.path / "tokenizer.json").read_text())
    names = {number: name for name, number in content["model"]["vocab"].items()}
    byte_of = gpt2_byte_characters()
    return bytes(byte_of[character] for one in ids for character in names[one])


@pytest.mark.parametrize(
    ("tokenizer", "shard_bytes", "seed"),
    thinned(["bytes", "train-bpe:290"], [2**28, 252], [0, 7], others=pytest.mark.long),
)
def test_text_bytes_of_splits_sum_to_those_of_the_data_set(tmp_path, tokenizer, shard_bytes, seed):
    texts = [random_text(seed + number, 1 + number % 40) for number in range(120)]
    source = write_lines(tmp_path / "a.jsonl", texts)
    build_dataset(
        [source], tokenizer, tmp_path / "set", validation=0.2, seed=seed,
        shard_bytes=shard_bytes, chunk_bytes=64,
    )  # fmt: skip
    dataset = TokenDataset.open(tmp_path / "set")
    splits, total = recorded(dataset)
    assert splits == {name: len(stored_bytes(dataset, name)) for name in ("train", "validation")}
    assert 0 < splits["validation"] < splits["train"]
    assert sum(splits.values()) == total == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize(
    ("tokenizer", "shard_bytes", "piece_characters"),
    thinned(["bytes", "train-bpe:260"], [60, 2**28], [50, 2**18], others=pytest.mark.long),
)
@pytest.mark.parametrize("validation", [0.001, 0.1, 0.3, 0.301, 0.302, 0.303, 0.98])
def test_text_bytes_of_a_tail_are_exact(
    tmp_path, monkeypatch, tokenizer, shard_bytes, piece_characters, validation
):
    """Also if the tail begins inside a piece, inside a character, or in a later shard."""
    monkeypatch.setattr(sources, "PIECE_CHARACTERS", piece_characters)
    text = "".join(random.Random(1).choices("東京🚀é\n ab", k=400))
    (tmp_path / "a.txt").write_text(text)
    build_dataset(
        [tmp_path / "a.txt"], tokenizer, tmp_path / "set", validation=validation,
        shard_bytes=shard_bytes, chunk_bytes=16,
    )  # fmt: skip
    dataset = TokenDataset.open(tmp_path / "set", verify=True)
    assert dataset.manifest.validation_by == "tail"
    parts = {name: stored_bytes(dataset, name) for name in ("train", "validation")}
    assert parts["train"] + parts["validation"] == text.encode()
    splits, total = recorded(dataset)
    assert splits == {name: len(part) for name, part in parts.items()}
    assert total == len(text.encode())


def test_text_bytes_of_a_tail_of_several_documents_are_exact(tmp_path):
    seed = next(
        seed
        for seed in range(10_000)
        if all(packing.hash_share(seed, number) >= 0.5 for number in range(5))
    )
    texts = ["東京", "ij", "klm", "🚀pqrs", "wx"]  # 21 bytes and 5 ends, of which 13 are held out
    source = write_lines(tmp_path / "a.jsonl", texts)
    build_dataset([source], "bytes", tmp_path / "set", validation=0.5, seed=seed)
    dataset = TokenDataset.open(tmp_path / "set")
    # 13 tokens from the end: an end, then "🚀pqrs", an end, "wx" and an end.
    assert recorded(dataset) == ({"train": 11, "validation": 10}, 21)


def file_tokenizer(folder, kind):
    """A tokenizer.json whose tokens are words with the space before them, or words alone."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = {"[SEP]": 0, "[UNK]": 1, "▁": 2, "▁ab": 3, "▁東京": 4, "ab": 5, "東京": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_text_bytes_of_a_tail_are_those_of_the_decoded_text(tmp_path):
    """For a tokenizer without byte-level tokens that restores the text."""
    tokenizer = file_tokenizer(tmp_path / "tokenizer", "metaspace")
    (tmp_path / "a.txt").write_text("ab ab ab ab ab ab 東京 東京")  # 8 tokens and the end
    build_dataset([tmp_path / "a.txt"], tokenizer, tmp_path / "set", validation=0.34)
    dataset = TokenDataset.open(tmp_path / "set")
    assert dataset.tokens("validation") == 3
    assert recorded(dataset) == ({"train": 17, "validation": 14}, 31)


def test_text_bytes_of_a_tail_are_in_proportion_if_the_tokenizer_loses_text(tmp_path):
    tokenizer = file_tokenizer(tmp_path / "tokenizer", "words")
    text = "AB  \n" * 60 + "Unknown" * 20
    (tmp_path / "a.txt").write_text(text)
    build_dataset([tmp_path / "a.txt"], tokenizer, tmp_path / "set", validation=0.5)
    splits, total = recorded(TokenDataset.open(tmp_path / "set"))
    assert sum(splits.values()) == total == len(text)
    assert 0.3 < splits["validation"] / total < 0.7


@pytest.mark.parametrize("validation", [0.3, 1e-9, 0.0])
def test_text_bytes_of_records_are_those_of_prompts_and_completions(tmp_path, validation):
    records = random_records(3, 40)
    source = write_records(tmp_path / "r.jsonl", records)
    build_dataset([source], "bytes", tmp_path / "set", content="records", validation=validation)
    dataset = TokenDataset.open(tmp_path / "set")
    splits, total = recorded(dataset)
    assert splits == {name: len(stored_bytes(dataset, name)) for name in dataset.splits}
    assert len(splits) == (2 if validation else 1)
    assert sum(splits.values()) == total
    assert total == sum(len((prompt + completion).encode()) for prompt, completion in records)


# Data sets of older format versions.


def as_older(folder, version):
    """Rewrite `dataset.json` as an older release did: version 1 for text, 2 for records."""
    file = folder / "dataset.json"
    content = json.loads(file.read_text())
    del content["checksum"]
    content["version"] = version
    if version == 1:
        del content["content"]
    for split in content["splits"].values():
        del split["text_bytes"]
    file.write_text(json.dumps(content | {"checksum": checksum_of(content)}))


# The fingerprints were printed by the last release before version 3, for the same input.
OLDER = [
    ("text", 1, "f99c001ddc9dc977841376c52cd2677f"),
    ("records", 2, "494b1f6fff8f31ab07e4b49ff561bffe"),
]


@pytest.mark.parametrize(("content", "version", "fingerprint"), OLDER)
def test_data_set_of_an_older_version_is_the_same_data_set(tmp_path, content, version, fingerprint):
    """A run that began with it resumes, also if the data set is built again."""
    source = tmp_path / "a.jsonl"
    if content == "text":
        write_lines(source, [f"text {n} été" for n in range(12)])
    else:
        write_records(source, [(f"prompt {n}", f" répond {n}") for n in range(12)])
    build_dataset([source], "bytes", tmp_path / "new", validation=0.25, content=content)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    as_older(tmp_path / "old", version)
    new, old = (
        TokenDataset.open(tmp_path / name, verify=True).fingerprint for name in ("new", "old")
    )
    assert new == old == fingerprint


def test_data_set_of_an_older_version_is_read_without_text_bytes_of_splits(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [random_text(n, 9) for n in range(40)])
    for name, validation in (("two", 0.25), ("one", 0.0)):
        build_dataset([source], "bytes", tmp_path / name, validation=validation, shard_bytes=100)
        written = TokenDataset.open(tmp_path / name)
        as_older(tmp_path / name, 1)
        older = TokenDataset.open(tmp_path / name, verify=True)
        assert older.splits == written.splits
        for split in older.splits:
            tokens = older.read(split, 0, older.tokens(split))
            assert np.array_equal(tokens, written.read(split, 0, written.tokens(split)))
        assert older.bytes_per_token == written.bytes_per_token
    two, one = (TokenDataset.open(tmp_path / name) for name in ("two", "one"))
    assert [two.text_bytes(split) for split in two.splits] == [None, None]
    assert one.text_bytes("train") == one.manifest.text_bytes  # the only split has all text
