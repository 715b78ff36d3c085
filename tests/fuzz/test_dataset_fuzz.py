"""Any file of a data set opens to what was written, or is refused by an error of ours.

What is valid is made by the public writer, whatever the format has in it.
"""

import contextlib
import json
import random

import pytest
from hypothesis import strategies as st
from mutations import mutated, mutated_json
from searching import EXAMPLES, search

from penstock.data import TokenDataset, build_dataset, load_tokenizer
from penstock.data.manifest import checksum_of, load_manifest
from penstock.errors import ConfigError, CorruptionError, DataError

REFUSALS = (CorruptionError, DataError)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    chosen = random.Random(1)
    texts = ["".join(chosen.choices("abcde \n", k=chosen.randint(20, 90))) for _ in range(20)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    build_dataset(
        [folder / "a.jsonl"],
        "train-bpe:262",
        folder / "set",
        validation=0.2,
        shard_bytes=1024,
        chunk_bytes=256,
    )
    return folder / "set"


@pytest.fixture
def folder(original):
    before = {path: path.read_bytes() for path in original.iterdir()}
    yield original
    for path, content in before.items():
        path.write_bytes(content)


def read_all(folder):
    dataset = TokenDataset.open(folder, verify=True)
    found = {}
    for split in dataset.splits:
        tokens = dataset.read(split, 0, dataset.tokens(split))
        assert tokens.size == 0 or tokens.max() < dataset.vocab_size
        ends = dataset.document_ends(split)
        assert ends.size == dataset.documents(split)
        found[split] = (tokens.tobytes(), ends.tobytes())
    return found


@EXAMPLES
def test_changed_description_is_equal_or_refused(folder, examples):
    path, valid = folder / "dataset.json", load_manifest(folder)

    def holds(data):
        path.write_bytes(data)
        with contextlib.suppress(*REFUSALS):
            assert load_manifest(folder) == valid

    search(mutated(path.read_bytes()), holds, examples)


@EXAMPLES
def test_resealed_description_is_verified_or_refused(folder, examples):
    path, valid = folder / "dataset.json", read_all(folder)
    content = json.loads(path.read_bytes())
    del content["checksum"]

    def holds(found):
        if isinstance(found, dict):
            found = found | {"checksum": checksum_of(found)}
        path.write_text(json.dumps(found))
        with contextlib.suppress(*REFUSALS):
            for tokens, ends in read_all(folder).values():
                assert tokens in b"".join(tokens for tokens, _ in valid.values())
                assert len(ends) <= sum(len(ends) for _, ends in valid.values())

    search(mutated_json(content), holds, examples)


@EXAMPLES
def test_any_bytes_are_no_description(folder, examples):
    def holds(data):
        (folder / "dataset.json").write_bytes(data)
        with pytest.raises(REFUSALS):
            TokenDataset.open(folder)

    known = st.sampled_from(["format", "version", "penstock-dataset", "checksum", "splits"])
    value = st.integers() | st.floats() | known | st.lists(known) | st.none()
    text = st.dictionaries(known, value).map(lambda found: json.dumps(found).encode())
    search(st.binary(max_size=300) | text, holds, examples)


@EXAMPLES
@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx", "tokenizer.json"])
def test_changed_file_is_equal_or_refused(folder, name, examples):
    path, valid = folder / name, read_all(folder)

    def holds(data):
        path.write_bytes(data)
        with contextlib.suppress(*REFUSALS):
            assert read_all(folder) == valid

    search(mutated(path.read_bytes()), holds, examples)


@EXAMPLES
def test_changed_tokenizer_works_or_is_refused(folder, tmp_path, examples):
    """Anybody's tokenizer.json: what loads has ids below its vocabulary for any text."""
    valid = (folder / "tokenizer.json").read_bytes()
    path = tmp_path / "tokenizer.json"

    def holds(data):
        path.write_bytes(data)
        with contextlib.suppress(DataError, ConfigError):
            tokenizer = load_tokenizer(str(path))
            assert 0 <= tokenizer.end_of_document < tokenizer.vocab_size
            for ids in tokenizer.encode_batch(["abc de", "é\0", ""]):
                assert ids.size == 0 or ids.max() < tokenizer.vocab_size
                assert isinstance(tokenizer.decode(ids), str)

    table = mutated_json(json.loads(valid)).map(lambda found: json.dumps(found).encode())
    search(mutated(valid) | table, holds, examples)
