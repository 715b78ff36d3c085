"""Tokenizers: text comes back exactly, boundaries cannot be forged, mistakes are explained."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock.data import ByteTokenizer, encodes_as, export_tokenizer, load_tokenizer
from penstock.data.tokenizers import FileTokenizer, train_bpe, train_size
from penstock.errors import ConfigError, DataError

ANY_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
WORDS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "def forward(self, x):\n    return self.layer(x)\n",
    "naïve café — 東京 🚀 \t\t  spaces   and\r\n\r\nlines\n",
] * 40


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(iter(WORDS), 340)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, bpe):
    return ByteTokenizer() if request.param == "bytes" else bpe


@settings(deadline=None, max_examples=200)
@given(texts=st.lists(ANY_TEXT, min_size=1, max_size=5))
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_any_text_round_trips(kind, texts, bpe):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    for ids in encoded:
        assert ids.size == 0 or ids.max() < tokenizer.vocab_size
        assert tokenizer.end_of_document not in ids


def test_byte_tokens_are_the_bytes_of_the_text():
    (ids,) = ByteTokenizer().encode_batch(["é\n"])
    assert ids.tolist() == [0xC3, 0xA9, 0x0A]
    assert ByteTokenizer().decode([0xC3, 0xA9, 256, 65, 0xFF]) == "é<|endoftext|>A\ufffd"
    assert ByteTokenizer.vocab_size == 257


def test_end_of_document_token_cannot_appear_in_text(tokenizer):
    text = "one<|endoftext|>two"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.end_of_document]) == "<|endoftext|>"


def test_training_merges_frequent_pairs_up_to_the_requested_size(bpe):
    assert bpe.vocab_size == 340
    (ids,) = bpe.encode_batch(["".join(WORDS)])
    assert ids.size < 0.6 * len("".join(WORDS).encode())


def test_the_same_text_trains_the_same_tokenizer_in_every_process(bpe):
    # Python's and Rust's hash tables are seeded anew in every process.
    code = (
        "import sys, json\n"
        "from penstock.data.tokenizers import train_bpe\n"
        "sys.stdout.buffer.write(train_bpe(iter(json.load(sys.stdin)), 340).to_json().encode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(WORDS).encode(), capture_output=True
    )
    assert done.stdout.decode() == bpe.to_json(), done.stderr.decode()


def test_error_of_the_text_during_training_is_raised_unchanged():
    def texts():
        yield "some text"
        raise DataError("the second file is broken")

    with pytest.raises(DataError, match=r"^the second file is broken$"):
        train_bpe(texts(), 300)


def test_a_tokenizer_loads_from_its_file_and_from_its_folder(bpe, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe.to_json())
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(str(spec))
        assert loaded.vocab_size == bpe.vocab_size
        assert loaded.end_of_document == bpe.end_of_document
        assert loaded.encode_batch(WORDS[:3])[1].tolist() == bpe.encode_batch(WORDS[:3])[1].tolist()


@pytest.mark.parametrize("style", ["text", "object"])
def test_a_hugging_face_folder_names_its_end_of_document(bpe, tmp_path, style):
    (tmp_path / "tokenizer.json").write_text(bpe.to_json())
    end = "\u010a"  # how byte-level tokenizers write a line break
    value = end if style == "text" else {"content": end, "lstrip": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    assert load_tokenizer(str(tmp_path)).end_of_document == bpe.token_id(end)


def test_exported_tokenizers_encode_the_same_in_transformers(tokenizer, tmp_path):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    export_tokenizer(tokenizer, tmp_path, max_length=48)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.model_max_length == 48
    for text in [*WORDS[:3], "".join(map(chr, range(1, 0x250)))]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.encode_batch([text])[0].tolist()
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == tokenizer.end_of_document


@pytest.mark.parametrize("other", [ByteTokenizer(), None], ids=["bytes", "bpe"])
def test_a_tokenizer_encodes_as_the_folder_it_was_exported_to(other, bpe, tmp_path):
    tokenizer = other or bpe
    export_tokenizer(tokenizer, tmp_path)
    assert encodes_as(tokenizer, tmp_path)
    assert not encodes_as(bpe if other else ByteTokenizer(), tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert encodes_as(tokenizer, tmp_path)  # nothing to differ from


def test_a_model_tokenizer_with_a_template_gets_no_special_tokens(bpe):
    from tokenizers import Tokenizer, processors

    theirs = Tokenizer.from_str(bpe.to_json())
    theirs.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    theirs.enable_truncation(4)
    theirs.enable_padding(length=50)
    ours = FileTokenizer(theirs, "theirs", 0)
    assert ours.encode_batch(WORDS[:1])[0].tolist() == bpe.encode_batch(WORDS[:1])[0].tolist()


@pytest.mark.parametrize("spec", ["train-bpe", "train-bpe:", "train-bpe:256", "train-bpe:4k"])
def test_invalid_size_is_refused(spec):
    with pytest.raises(ConfigError) as error:
        train_size(spec)
    assert str(error.value) == (
        f"tokenizer '{spec}': expected train-bpe:SIZE with SIZE from 257 (every byte and the end "
        "of text) to 16777216, such as train-bpe:4096"
    )


def test_unknown_tokenizer_is_refused():
    with pytest.raises(DataError) as error:
        load_tokenizer("byte")
    assert str(error.value) == (
        "tokenizer 'byte' does not exist (did you mean 'bytes'?); expected bytes, train-bpe:SIZE, "
        "or the path of a tokenizer.json or of a folder with one"
    )


def test_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(DataError) as error:
        load_tokenizer(str(tmp_path))
    assert str(error.value) == (
        f"folder {tmp_path} holds no tokenizer.json; write one with transformers: "
        "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER); or name another, such as "
        "train-bpe:4096 or the path of a tokenizer.json"
    )


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_broken_tokenizer_file_is_refused(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    start = re.escape(f"{file} is not a tokenizer of the `tokenizers` library: ")
    with pytest.raises(DataError, match=f"^{start}"):
        load_tokenizer(str(file))


def test_tokenizer_without_end_of_document_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(file))
    with pytest.raises(DataError) as error:
        load_tokenizer(str(file))
    assert str(error.value) == (
        f"tokenizer {file} has no end-of-document token; name one as eos_token in a "
        "tokenizer_config.json beside it (looked for <|endoftext|>, <|end_of_text|>, </s>, <eos>, "
        "<|eos|>, [SEP])"
    )


def test_end_of_document_beyond_the_models_vocabulary_is_refused(tmp_path, bpe):
    file = tmp_path / "tokenizer.json"
    file.write_text(bpe.to_json())
    end, number = max(json.loads(bpe.to_json())["model"]["vocab"].items(), key=lambda item: item[1])
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": number}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    with pytest.raises(DataError) as error:
        load_tokenizer(str(tmp_path))
    assert str(error.value) == (
        f"tokenizer {file}: the token that ends a document has id {number}, config.json beside it "
        f"allows ids below {number}"
    )


def test_ids_without_text_are_refused(tokenizer):
    size = tokenizer.vocab_size
    for bad in (-1, size):
        with pytest.raises(DataError) as error:
            tokenizer.decode(np.array([1, bad]))
        assert str(error.value) == (
            f"token id {bad} has no text: tokenizer {tokenizer.name} has ids 0-{size - 1}"
        )
