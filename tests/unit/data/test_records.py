"""Prompts with completions: how they are stored, refused, and drawn as rows of a batch."""

import json
import random

import numpy as np
import pytest
from records import END, byte_tokens, random_records, write_records

from penstock.data import (
    IGNORED_LABEL,
    LanguageModelSource,
    RecordSource,
    TokenDataset,
    build_dataset,
    load_tokenizer,
)
from penstock.data.manifest import checksum_of
from penstock.errors import ConfigError, CorruptionError, DataError


def built(folder, records, tokenizer="bytes", **options):
    """Return the data set of some records."""
    options = {"validation": 0.0, **options}
    source = write_records(folder / "records.jsonl", records)
    build_dataset([source], tokenizer, folder / "set", content="records", **options)
    return TokenDataset.open(folder / "set", verify=True)


def stored(dataset, split="train"):
    """Return (tokens of the prompt, tokens of the completion) of every record, in order."""
    index = dataset.records(split)
    found = []
    for number in range(len(index)):
        spans = index.spans(number, number + 1)
        start, border, end = (int(x[0]) for x in (spans.start, spans.border, spans.end))
        tokens = dataset.read(split, start, end).tolist()
        found.append((tokens[: border - start], tokens[border - start :]))
    return found


# Building


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shard_bytes", [12, 100, 2**20])
def test_record_is_prompt_completion_and_end_token(seed, shard_bytes, tmp_path):
    """In shards of any size, even such that records and whole prompts lie across several."""
    records = random_records(seed, 12)
    dataset = built(tmp_path, records, shard_bytes=shard_bytes, chunk_bytes=16)
    assert stored(dataset) == [byte_tokens(record) for record in records]
    spans = dataset.records("train").spans(0, 12)
    assert np.array_equal(spans.end, dataset.document_ends("train"))
    (blocks,) = dataset.records("train").blocks()
    assert np.array_equal(blocks.border, spans.border)
    assert dataset.records("train").longest() == max(
        len(prompt) + len(completion) - 1 for prompt, completion in map(byte_tokens, records)
    )


def test_prompt_and_completion_are_tokenised_separately(tmp_path):
    """With merges that would reach across the border if they could."""
    records = [("aaa" * (i % 5 + 1), "aaaa" * (i % 3 + 1)) for i in range(60)]
    dataset = built(tmp_path, records, "train-bpe:300")
    tokenizer = load_tokenizer(str(dataset.path))
    texts = [text for record in records for text in record]
    ids = [one.tolist() for one in tokenizer.encode_batch(texts)]
    assert max(map(len, ids)) < 15, "something was merged"
    end = tokenizer.end_of_document
    expected = [(p, [*c, end]) for p, c in zip(ids[::2], ids[1::2], strict=True)]
    assert stored(dataset) == expected


def test_field_names_are_configurable_and_others_ignored(tmp_path):
    records = random_records(3, 5)
    lines = [json.dumps({"q": p, "a": c, "prompt": 7, "source": None}) for p, c in records]
    (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n\n")
    options = {"content": "records", "prompt_field": "q", "completion_field": "a"}
    build_dataset([tmp_path / "x.jsonl"], "bytes", tmp_path / "set", validation=0, **options)
    dataset = TokenDataset.open(tmp_path / "set")
    assert stored(dataset) == [byte_tokens(record) for record in records]


def test_records_from_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = random_records(4, 300)
    columns = {"completion": [c for _, c in records], "prompt": [p for p, _ in records]}
    parquet.write_table(arrow.table(columns), tmp_path / "x.parquet")
    build_dataset(
        [tmp_path / "x.parquet"], "bytes", tmp_path / "set", validation=0, content="records"
    )
    assert stored(TokenDataset.open(tmp_path / "set")) == [byte_tokens(r) for r in records]


@pytest.mark.parametrize("seed", range(3))
def test_whole_records_are_held_out(seed, tmp_path):
    records = [(f"{number}", f" {number * number}") for number in range(100)]
    dataset = built(tmp_path, records, validation=0.2, seed=seed)
    train, validation = stored(dataset), stored(dataset, "validation")
    assert 5 <= len(validation) <= 40
    assert train[0] == byte_tokens(records[0])
    order = [byte_tokens(record) for record in records]
    assert sorted(train + validation, key=order.index) == order
    assert train == [one for one in order if one in train]


def test_one_record_is_held_out_if_none_was_selected(tmp_path):
    source = write_records(tmp_path / "a.jsonl", random_records(0, 3))
    report = build_dataset([source], "bytes", tmp_path / "set", content="records", validation=1e-9)
    dataset = TokenDataset.open(tmp_path / "set")
    assert stored(dataset) + stored(dataset, "validation") == [
        byte_tokens(record) for record in random_records(0, 3)
    ]
    assert dataset.documents("validation") == 1
    assert report.notes == (
        "none of the 3 records was selected as held-out data; the last one is the validation split "
        "instead",
    )


def test_single_record_is_in_the_train_split(tmp_path):
    source = write_records(tmp_path / "a.jsonl", [("a", "b")])
    report = build_dataset([source], "bytes", tmp_path / "set", content="records")
    assert TokenDataset.open(tmp_path / "set").splits == ("train",)
    assert report.notes == ("there is one record: none is held out",)


BROKEN = {
    "no prompt": (
        '{"promt": "a", "completion": "b"}',
        "{place}: no field 'prompt' (did you mean 'promt'?); the fields are 'promt', 'completion'; "
        "choose another with --prompt-field or data.prompt_field",
    ),
    "no completion": (
        '{"prompt": "a", "answer": "b"}',
        "{place}: no field 'completion'; the fields are 'prompt', 'answer'; choose another with "
        "--completion-field or data.completion_field",
    ),
    "not text": (
        '{"prompt": "a", "completion": 5}',
        "{place}: field 'completion' must be text, got a number",
    ),
    "null": (
        '{"prompt": null, "completion": "b"}',
        "{place}: field 'prompt' must be text, got null",
    ),
    "empty": (
        '{"prompt": "a", "completion": ""}',
        "{place}: field 'completion' is empty: there is nothing to learn; add the completion "
        "or remove the record",
    ),
    "no object": (
        '["a", "b"]',
        "{place}: expected a JSON object with a field 'prompt' and a field 'completion', got a "
        "list",
    ),
    "broken": ('{"prompt": "a", ', "{place}: broken JSON at column 16: "),
    "not UTF-8": (b'{"prompt": "\xff"}', "{place}: byte 47 (0xff) is not UTF-8 text "),
    "half a character": (
        '{"prompt": "a", "completion": "\\ud800"}',
        "{place}: field 'completion' has half of a surrogate pair at character 0, which is not "
        "text",
    ),
}


@pytest.mark.parametrize(("line", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_bad_line_is_refused_by_file_and_number(line, message, tmp_path):
    file = tmp_path / "some.jsonl"
    good = b'{"prompt": "a", "completion": "b"}\n'
    file.write_bytes(good + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good)
    with pytest.raises(DataError) as error:
        build_dataset([file], "bytes", tmp_path / "set", content="records")
    assert str(error.value).startswith(message.format(place=f"{file}:2"))
    assert not (tmp_path / "set").exists()


def test_records_and_plain_text_cannot_be_mixed(tmp_path):
    write_records(tmp_path / "a.jsonl", [("a", "b")])
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError) as error:
        build_dataset([tmp_path], "bytes", tmp_path.with_name("set"), content="records")
    assert str(error.value) == (
        f"{tmp_path / 'b.txt'}: prompts with completions come from .jsonl and .parquet files, but "
        "this file is read as plain text, and one data set cannot hold both; remove the file or "
        "build a data set of text"
    )


def test_text_build_of_records_names_the_remedy(tmp_path):
    file = write_records(tmp_path / "a.jsonl", [("a", "b")])
    with pytest.raises(DataError) as error:
        build_dataset([file], "bytes", tmp_path / "set")
    assert str(error.value) == (
        f"{file}:1: no field 'text'; the fields are 'prompt', 'completion'; choose another with "
        "--field or data.text_field, or build records of prompt and completion: --content "
        "records, or data.content: records"
    )


def test_input_without_records_is_refused(tmp_path):
    file = write_records(tmp_path / "a.jsonl", [])
    with pytest.raises(DataError) as error:
        build_dataset([file], "bytes", tmp_path / "set", content="records")
    assert str(error.value) == f"there is no record in {file}"


def test_content_is_text_or_records(tmp_path):
    file = write_records(tmp_path / "a.jsonl", [("a", "b")])
    with pytest.raises(ConfigError) as error:
        build_dataset([file], "bytes", tmp_path / "set", content="record")
    assert str(error.value) == (
        "content: expected text or records, got 'record' (did you mean 'records'?)"
    )


# The format


def test_plain_text_data_set_has_no_records(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    build_dataset([tmp_path / "a.txt"], "bytes", tmp_path / "set")
    dataset = TokenDataset.open(tmp_path / "set")
    assert dataset.content == "text"
    with pytest.raises(DataError, match="holds plain text, not prompts and completions"):
        RecordSource(dataset, "train", 8)


def reseal(folder, change):
    """Change the manifest and give it the checksum that belongs to it."""
    file = folder / "dataset.json"
    content = json.loads(file.read_text())
    del content["checksum"]
    change(content)
    file.write_text(json.dumps(content | {"checksum": checksum_of(content)}))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(version=1),
        lambda content: content.update(content="text"),
        lambda content: content.pop("content"),
        lambda content: content.update(content="pairs"),
        lambda content: content["splits"]["train"].update(documents=11),
    ],
)
def test_a_manifest_must_say_what_the_index_holds(change, tmp_path):
    dataset = built(tmp_path, random_records(1, 10))
    reseal(dataset.path, change)
    with pytest.raises(CorruptionError, match="breaks the format"):
        TokenDataset.open(dataset.path)


@pytest.mark.long
def test_every_flipped_bit_of_an_index_is_found(tmp_path):
    dataset = built(tmp_path, random_records(1, 2), chunk_bytes=16)
    file = dataset.path / "train-00000.idx"
    good = file.read_bytes()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        with pytest.raises(CorruptionError, match=r"train-00000\.idx is corrupt between byte"):
            RecordSource(TokenDataset.open(dataset.path), "train", 100)


@pytest.mark.parametrize("seed", range(20))
def test_inconsistent_index_is_refused(seed, tmp_path):
    """With checksums that match: only its numbers are wrong."""
    import xxhash

    dataset = built(tmp_path, random_records(seed, 6))
    file = dataset.path / "train-00000.idx"
    entries = np.fromfile(file, dtype="<u8").reshape(-1, 2)
    rng = np.random.default_rng(seed)
    place = rng.integers(6), rng.integers(2)
    wrong = [0, 2**63, 2**64 - 1, 2**63 - 1, int(entries[-1, 0]) + 1]
    entries[place] = wrong[seed % 5] if place[1] == 0 else [0, 2**63, 2**64 - 1, 500][seed % 4]
    file.write_bytes(entries.tobytes())

    def change(content):
        (shard,) = content["splits"]["train"]["shards"]
        shard["index"]["chunks"] = [xxhash.xxh3_128_hexdigest(entries.tobytes())]

    reseal(dataset.path, change)
    with pytest.raises(CorruptionError, match=r"train-00000\.idx breaks the format: record \d"):
        RecordSource(TokenDataset.open(dataset.path), "train", 100)


# Rows


def expected_row(record, length):
    """Return the inputs and labels of a record, written out; None if its completion is too long."""
    prompt, completion = byte_tokens(record)
    if len(completion) > length:
        return None
    prompt = prompt[-(length + 1 - len(completion)) :]
    inputs = (prompt + completion)[:-1]
    labels = [IGNORED_LABEL] * (len(prompt) - 1) + completion
    padding = length - len(inputs)
    return (*inputs, *[END] * padding), (*labels, *[IGNORED_LABEL] * padding)


def rows_of(batch):
    assert set(batch) == {"input_ids", "labels"}
    assert all(array.dtype == np.int64 for array in batch.values())
    return [
        (tuple(inputs), tuple(labels))
        for inputs, labels in zip(
            batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("length", [4, 9, 25, 120])
@pytest.mark.parametrize("seed", range(3))
def test_every_record_is_drawn_once_per_epoch(seed, length, tmp_path):
    """Padded, or short of the beginning of its prompt, or, if it cannot fit, not at all."""
    records = random_records(seed, 50)
    source = RecordSource(built(tmp_path, records), "train", length, seed)
    wanted = [row for row in (expected_row(record, length) for record in records) if row]
    assert source.records == len(wanted)
    assert source.left_out == 50 - len(wanted)
    size = random.Random(seed).randint(1, 7)
    drawn = []
    for step in range(-(-3 * len(wanted) // size)):
        drawn += rows_of(source.batch(step, range(size), size))
    epochs = [drawn[i * len(wanted) : (i + 1) * len(wanted)] for i in range(3)]
    assert all(sorted(epoch) == sorted(wanted) for epoch in epochs)
    if len(wanted) > 4:
        assert epochs[0] != epochs[1] != epochs[2]
    labels = np.array([row[1] for row in wanted])
    inputs = [
        sum(map(len, byte_tokens(record))) - 1 for record in records if expected_row(record, length)
    ]
    assert source.shortened == sum(count > length for count in inputs)
    assert source.padding == pytest.approx(
        1 - sum(min(count, length) for count in inputs) / labels.size
    )


def test_row_depends_only_on_seed_step_and_index(tmp_path):
    dataset = built(tmp_path, random_records(5, 30))
    whole = RecordSource(dataset, "train", 40, 7).batch(9, range(8), 8)
    for first, stop in ((0, 3), (3, 8)):
        fresh = RecordSource(TokenDataset.open(dataset.path), "train", 40, 7)
        part = fresh.batch(9, range(first, stop), 8)
        for name, array in part.items():
            assert np.array_equal(array, whole[name][first:stop])
    other = RecordSource(dataset, "train", 40, 8).batch(9, range(8), 8)
    assert not np.array_equal(other["input_ids"], whole["input_ids"])


@pytest.mark.parametrize("length", [10, 60])
def test_evaluation_reads_records_in_order(length, tmp_path):
    records = random_records(6, 23)
    source = RecordSource(built(tmp_path, records), "train", length)
    wanted = [row for row in (expected_row(record, length) for record in records) if row]
    for limit in (None, 5, 1000):
        batches = [rows_of(batch) for batch in source.evaluation_batches(4, limit)]
        assert [row for batch in batches for row in batch] == wanted[:limit]
        assert [len(batch) for batch in batches[:-1]] == [4] * (len(batches) - 1)


def test_too_long_records_are_reported(tmp_path):
    records = [("a" * 10, "b" * 2)] * 3 + [("a", "b" * 20)] * 2 + [("a", "b")]
    source = RecordSource(built(tmp_path, records), "train", 8)
    assert source.warnings() == [
        "train split: 3 of 6 records are longer than 8 tokens; their prompts are shortened at the "
        "beginning",
        "train split: 2 of 6 records are not used: their completions alone need more than 8 "
        "tokens; raise data.sequence_length to train on them",
    ]
    assert RecordSource(source.dataset, "train", 21).warnings() == []
    with pytest.raises(DataError) as error:
        RecordSource(source.dataset, "train", 1)
    assert str(error.value) == (
        f"split 'train' of data set {source.dataset.path} has no record whose completion fits "
        "sequences of 1 tokens, the longest needs 21; raise data.sequence_length"
    )


def test_windows_over_records_ignore_record_boundaries(tmp_path):
    """The tokens of records are one sequence too, for who wants to train on all of them."""
    records = random_records(8, 20)
    dataset = built(tmp_path, records)
    tokens = [token for record in records for part in byte_tokens(record) for token in part]
    (batch,) = LanguageModelSource(dataset, "train", 16).evaluation_batches(1, 1)
    assert batch["input_ids"][0].tolist() == tokens[:16]
