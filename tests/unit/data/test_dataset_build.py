"""Building: what is in a data set, what is held out, and that failure leaves nothing behind."""

import json
import os
import random

import numpy as np
import pytest
from grids import thinned
from refused_builds import leftovers, refused

from penstock.data import (
    ByteTokenizer,
    TokenDataset,
    build as build_module,
    build_dataset,
    load_tokenizer,
    packing as packing_module,
    shards as shards_module,
)
from penstock.data.tokenizers import FileTokenizer, train_bpe
from penstock.errors import ConfigError, DataError, StorageError

WORDS = ["stream", "the", "weights", "layer", "by", "layer", "through", "東京", "été\n"]


def random_documents(seed, count, longest=300):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def write_lines(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def all_documents(dataset, split):
    """The texts of a split, cut where the index says, by our own reading of the format."""
    ids = dataset.read(split, 0, dataset.tokens(split))
    ends = dataset.document_ends(split)
    decode = dataset.tokenizer().decode
    texts = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        assert ids[end - 1] == dataset.end_of_document
        assert dataset.end_of_document not in ids[begin : end - 1]
        texts.append(decode(ids[begin : end - 1]))
    return texts


@pytest.mark.parametrize(
    ("tokenizer", "shard_bytes", "seed"),
    thinned(["bytes", "train-bpe:280"], [2**28, 4096, 252], [0, 7], others=pytest.mark.long),
)
def test_every_document_is_in_one_split_in_order(tmp_path, tokenizer, shard_bytes, seed):
    documents = random_documents(seed, 120)
    source = write_lines(tmp_path / "a.jsonl", documents)
    report = build_dataset(
        [source], tokenizer, tmp_path / "out", validation=0.2, seed=seed,
        shard_bytes=shard_bytes, chunk_bytes=64,
    )  # fmt: skip
    dataset = TokenDataset.open(report.path, verify=True)
    train, validation = (all_documents(dataset, split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(documents)
    assert [text for text in documents if text in set(train)] == train
    assert [text for text in documents if text in set(validation)] == validation
    assert 5 <= len(validation) <= 45
    assert dataset.documents("train") == len(train)
    assert report.manifest.text_bytes == sum(len(text.encode()) for text in documents)
    assert report.notes == ()


@pytest.mark.parametrize("pattern", ["texts/**/*", "texts/**"])
def test_no_document_is_held_out_and_trained_on_if_a_pattern_matches_a_file_twice(
    tmp_path, monkeypatch, pattern
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    texts = [f"text {n}" for n in range(41)]
    for number, text in enumerate(texts):
        folder = "texts/sub" if number % 2 else "texts"
        (tmp_path / folder / f"{number}.txt").write_text(text)
    report = build_dataset([pattern, "texts/0.txt"], "bytes", "out", validation=0.2)
    dataset = TokenDataset.open("out")
    train, validation = (all_documents(dataset, split) for split in ("train", "validation"))
    assert report.files == 41
    assert sorted(train + validation) == sorted(texts)
    assert validation
    assert not set(train) & set(validation)


def test_tokens_on_disk_equal_the_tokenizers_output(tmp_path):
    documents = random_documents(3, 5)
    source = write_lines(tmp_path / "a.jsonl", documents)
    build_dataset([source], "bytes", tmp_path / "out", validation=0)
    stored = np.fromfile(tmp_path / "out" / "train-00000.bin", dtype="<u2").tolist()
    expected = [id for text in documents for id in [*text.encode(), 256]]
    assert stored == expected
    ends = np.fromfile(tmp_path / "out" / "train-00000.idx", dtype="<u8")
    assert np.array_equal(ends, np.cumsum([len(text.encode()) + 1 for text in documents]))
    assert TokenDataset.open(tmp_path / "out").splits == ("train",)


@pytest.mark.long
def test_large_vocabularies_are_stored_in_four_bytes(tmp_path):
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(train_bpe(iter(WORDS), 300).to_json())
    tokenizer.add_tokens([AddedToken(f"word{n}") for n in range(70_000)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("x word69999 y")
    build_dataset([tmp_path / "a.txt"], str(tmp_path), tmp_path / "out" / "d", validation=0)
    dataset = TokenDataset.open(tmp_path / "out" / "d")
    assert dataset.manifest.dtype == "uint32"
    assert all_documents(dataset, "train") == ["x word69999 y"]
    assert dataset.read("train", 0, dataset.tokens("train")).max() > 2**16


def test_split_depends_only_on_the_seed(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", random_documents(1, 200))
    held = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        report = build_dataset([source], "bytes", tmp_path / name, validation=0.3, seed=seed)
        held[name] = all_documents(TokenDataset.open(report.path), "validation")
    assert held["a"] == held["b"] != held["c"]
    fingerprints = [TokenDataset.open(tmp_path / name).fingerprint for name in "abc"]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_result_is_independent_of_encoding_batches(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "a.jsonl", random_documents(1, 50))
    build_dataset([source], "train-bpe:300", tmp_path / "a")
    monkeypatch.setattr(packing_module, "BATCH_PARTS", 3)
    monkeypatch.setattr(packing_module, "BATCH_CHARACTERS", 100)
    build_dataset([source], "train-bpe:300", tmp_path / "b")
    one, other = (TokenDataset.open(tmp_path / name).fingerprint for name in "ab")
    assert one == other


@pytest.mark.parametrize("shard_bytes", [2**28, 256, 200])
@pytest.mark.parametrize("length", [1, 2, 10, 1000, 1279, 1280, 5001])
def test_tail_of_a_single_document_is_the_validation_split(tmp_path, length, shard_bytes):
    text = "".join(random.Random(length).choices("abcdefg", k=length))
    (tmp_path / "a.txt").write_text(text)
    report = build_dataset(
        [tmp_path / "a.txt"], "bytes", tmp_path / "out", validation=0.1,
        shard_bytes=shard_bytes, chunk_bytes=64,
    )  # fmt: skip
    dataset = TokenDataset.open(report.path, verify=True)
    parts = [dataset.read(split, 0, dataset.tokens(split)) for split in ("train", "validation")]
    assert np.concatenate(parts).tolist() == [*text.encode(), 256]
    tail = max(1, (length + 1) // 10)
    assert len(parts[1]) == tail
    assert dataset.document_ends("train").tolist() == [length + 1 - tail]
    assert dataset.document_ends("validation").tolist() == [tail]
    assert report.manifest.validation_by == "tail"
    assert report.notes == (
        "the text is one document: its last "
        f"{'token is' if tail == 1 else f'{tail:,} tokens are'} the validation split",
    )
    stored = {record.file for record in report.manifest.files()} | {
        "dataset.json",
        "built_from.json",
    }
    assert stored == set(os.listdir(report.path))


@pytest.mark.parametrize("shard_bytes", [2**28, 64])
def test_the_tail_keeps_the_boundaries_of_its_documents(tmp_path, shard_bytes):
    documents = ["abcdefgh", "ij", "klm", "nopqrstuv", "wx"]
    source = write_lines(tmp_path / "a.jsonl", documents)
    seed = next(
        seed
        for seed in range(10_000)
        if all(packing_module.hash_share(seed, number) >= 0.5 for number in range(5))
    )
    build_dataset(
        [source], "bytes", tmp_path / "out", validation=0.5, seed=seed,
        shard_bytes=shard_bytes, chunk_bytes=16,
    )  # fmt: skip
    dataset = TokenDataset.open(tmp_path / "out", verify=True)
    whole = "".join(text + "|" for text in documents)  # 29 tokens, of which 14 are held out
    assert whole[15:] == "|nopqrstuv|wx|"
    assert dataset.document_ends("train").tolist() == [9, 12, 15]
    assert dataset.document_ends("validation").tolist() == [1, 11, 14]
    assert dataset.read("validation", 0, 14).tolist() == [
        256 if letter == "|" else ord(letter) for letter in whole[15:]
    ]


def test_small_text_gives_a_notice_of_a_small_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("abc abc abc")
    report = build_dataset([tmp_path / "a.txt"], "train-bpe:4096", tmp_path / "out")
    size = report.manifest.vocab_size
    assert 257 <= size < 300
    assert report.notes[1] == (
        f"the text gives a tokenizer of {size} tokens, fewer than the requested 4096"
    )


def test_tokenizer_of_another_data_set_can_be_used(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", random_documents(1, 50))
    build_dataset([source], "train-bpe:300", tmp_path / "a")
    build_dataset([source], str(tmp_path / "a"), tmp_path / "b")
    build_dataset([source], "bytes", tmp_path / "c")
    one, other, third = (TokenDataset.open(tmp_path / name) for name in "abc")
    assert one.fingerprint == other.fingerprint
    assert isinstance(third.tokenizer(), ByteTokenizer)
    assert isinstance(load_tokenizer(str(tmp_path / "c")), ByteTokenizer)


def test_tokenizer_training_samples_a_large_text(tmp_path, monkeypatch):
    documents = random_documents(1, 400)
    source = write_lines(tmp_path / "a.jsonl", documents)
    monkeypatch.setattr(build_module, "TRAINING_BYTES", source.stat().st_size // 4)
    seen = []

    def spy(texts, size):
        seen.extend(texts)
        return train_bpe(iter(seen), size)

    monkeypatch.setattr(build_module, "train_bpe", spy)
    build_dataset([source], "train-bpe:280", tmp_path / "out")
    assert 0.15 < len(seen) / len(documents) < 0.35
    assert set(seen) <= set(documents)
    assert {documents.index(text) // 100 for text in seen} == {0, 1, 2, 3}


def test_progress_ends_at_the_total(tmp_path):
    files = [write_lines(tmp_path / f"{n}.jsonl", random_documents(n, 50)) for n in (1, 2)]
    calls = []
    build_dataset(files, "train-bpe:280", tmp_path / "out", on_progress=lambda *a: calls.append(a))
    total = sum(file.stat().st_size for file in files)
    assert {call[0] for call in calls} == {"training the tokenizer", "tokenising"}
    for phase in ("training the tokenizer", "tokenising"):
        done = [call[1] for call in calls if call[0] == phase]
        assert done == sorted(done)
        assert done[-1] == total


# What is refused, and that nothing is left of it.


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan")])
def test_invalid_validation_share_is_refused(tmp_path, share):
    message = refused(
        tmp_path, ["a"], "bytes", tmp_path / "out", validation=share, error=ConfigError
    )
    assert message == (
        f"validation must be a share from 0 to less than 1, such as 0.05; got {share}"
    )


def test_input_without_text_is_refused(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"")
    for tokenizer in ("bytes", "train-bpe:300"):
        assert refused(tmp_path, [tmp_path / "a.txt"], tokenizer, tmp_path / "out") == (
            f"there is no text in {tmp_path / 'a.txt'}: every document is empty"
        )
    inputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert refused(tmp_path, inputs, "bytes", tmp_path / "out") == (
        "there is no text in the 2 input files: every document is empty"
    )


def test_token_ids_beyond_the_vocabulary_name_the_record(tmp_path):
    trained = train_bpe(iter([*WORDS * 20, "zebra " * 50]), 300)
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text(trained.to_json())
    (model / "config.json").write_text('{"vocab_size": 257}')
    (ids,) = trained.encode_batch(["zebra"])
    assert ids.max() >= 257
    source = write_lines(tmp_path / "a.jsonl", ["ok", "o", "zebra"])
    assert refused(tmp_path, [source], str(model), tmp_path / "out") == (
        f"{source}:3: token id {ids.max()} is beyond the vocabulary of tokenizer model, ids "
        "0-256; the tokenizer and its config.json do not belong together"
    )


@pytest.mark.parametrize("tokenizer", ["bytes", "train-bpe:300"])
def test_broken_last_record_leaves_no_data_set(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(packing_module, "BATCH_PARTS", 3)
    source = write_lines(tmp_path / "a.jsonl", random_documents(1, 50))
    with source.open("a") as file:
        file.write("{\n")
    message = refused(tmp_path, [source], tokenizer, tmp_path / "new" / "out", overwrite=True)
    assert message == (
        f"{source}:51: broken JSON at column 2: Expecting property name enclosed in double quotes"
    )


def test_existing_output_is_refused(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", random_documents(1, 20))
    build_dataset([source], "bytes", tmp_path / "out")
    first = TokenDataset.open(tmp_path / "out").fingerprint
    assert refused(tmp_path, [source], "bytes", tmp_path / "out") == (
        f"{tmp_path / 'out'} exists; choose another output folder, or replace it with --overwrite"
    )
    build_dataset([source], "bytes", tmp_path / "out", seed=5, overwrite=True)
    assert TokenDataset.open(tmp_path / "out", verify=True).fingerprint != first
    assert leftovers(tmp_path) == ["a.jsonl", "out"]


def test_overwrite_replaces_only_data_sets(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", random_documents(1, 20))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    message = refused(tmp_path, [source], "bytes", tmp_path / "home", overwrite=True)
    assert message == (
        f"{tmp_path / 'home'} exists and is not a data set, so --overwrite does not replace it; "
        "choose another output folder or remove it yourself"
    )
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"


def test_output_inside_the_input_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert refused(tmp_path, [tmp_path], "bytes", tmp_path / "sub" / "out") == (
        f"the output folder {tmp_path / 'sub' / 'out'} lies inside the input folder {tmp_path}, "
        "where the next build would read it as text; choose another output folder"
    )


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_full_disk_leaves_only_the_old_data_set(tmp_path, monkeypatch, after, overwrite):
    source = write_lines(tmp_path / "a.jsonl", random_documents(1, 50))
    if overwrite:
        build_dataset([source], "bytes", tmp_path / "out")
    kept = overwrite and TokenDataset.open(tmp_path / "out").fingerprint
    real, written = shards_module.DataSetFile._put, []

    def full(self, count):
        written.append(count)
        if len(written) > after:
            raise OSError(28, "No space left on device")
        real(self, count)

    monkeypatch.setattr(shards_module.DataSetFile, "_put", full)
    message = refused(
        tmp_path, [source], "bytes", tmp_path / "out", seed=9, chunk_bytes=64,
        overwrite=overwrite, error=StorageError,
    )  # fmt: skip
    assert message == (
        f"cannot write {tmp_path / 'out'}: No space left on device; nothing was left behind; "
        "free some space there or choose another output folder"
    )
    if overwrite:
        assert TokenDataset.open(tmp_path / "out", verify=True).fingerprint == kept


@pytest.mark.parametrize("phase", ["training the tokenizer", "tokenising"])
def test_interrupt_leaves_no_file(tmp_path, phase):
    source = write_lines(tmp_path / "a.jsonl", random_documents(1, 50))

    def interrupt(now, done, total):
        if now == phase and done > total // 2:
            raise KeyboardInterrupt

    refused(
        tmp_path, [source], "train-bpe:300", tmp_path / "out",
        on_progress=interrupt, error=KeyboardInterrupt,
    )  # fmt: skip


def test_interrupt_while_publishing_leaves_one_complete_data_set(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "a.jsonl", random_documents(1, 50))
    build_dataset([source], "bytes", tmp_path / "out")
    old = TokenDataset.open(tmp_path / "out").fingerprint
    build_dataset([source], "bytes", tmp_path / "other", seed=3)
    new = TokenDataset.open(tmp_path / "other").fingerprint
    real, seen = os.fsync, set()
    for moment in range(30):
        count = 0

        def cut(descriptor):
            nonlocal count
            count += 1
            if count > moment:  # noqa: B023
                raise OSError(5, "Input/output error")
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", cut)
            try:
                build_dataset([source], "bytes", tmp_path / "out", seed=3, overwrite=True)
            except StorageError:
                failed = True
            else:
                failed = False
        seen.add(TokenDataset.open(tmp_path / "out", verify=True).fingerprint)
        assert leftovers(tmp_path) == ["a.jsonl", "other", "out"]
        if not failed:
            break
    assert not failed
    assert seen == {old, new}


def test_check_of_a_data_set_precedes_its_publication(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", random_documents(1, 20))
    build_dataset([source], "bytes", tmp_path / "out")
    old = TokenDataset.open(tmp_path / "out").fingerprint

    def refuse(folder):
        assert TokenDataset.open(folder, verify=True).fingerprint != old
        raise DataError("not this one")

    with pytest.raises(DataError, match="not this one"):
        build_dataset([source], "bytes", tmp_path / "out", seed=3, overwrite=True, check=refuse)
    assert TokenDataset.open(tmp_path / "out", verify=True).fingerprint == old
    assert leftovers(tmp_path) == ["a.jsonl", "out"]


def test_documents_without_tokens_are_skipped(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "a": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = write_lines(tmp_path / "a.jsonl", ["a b", "   ", "a"])
    report = build_dataset([source], str(tmp_path), tmp_path / "o" / "ut", validation=0)
    dataset = TokenDataset.open(report.path)
    assert dataset.read("train", 0, 5).tolist() == [2, 0, 1, 2, 1]
    assert dataset.documents("train") == 2
    assert isinstance(dataset.tokenizer(), FileTokenizer)
