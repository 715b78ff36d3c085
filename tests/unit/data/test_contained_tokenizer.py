"""A tokenizer of somebody else's making can fail, panic or ask for all memory; the run cannot."""

import gc
import json
import os
import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.data import build_dataset
from penstock.data.contained_tokenizer import LEAST_BYTES, ContainedTokenizer
from penstock.data.tokenizers import load_tokenizer, train_bpe
from penstock.errors import DataError

VOCABULARY = {"<unk>": 0, "x": 1, " ": 2, "</s>": 3}


def tokenizer_file(folder, change):
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[], unk_token="<unk>"))
    change(tokenizer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def backtracks(tokenizer):
    """Exponential in the length of a word: the library panics at a limit on retries."""
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")


def doubles(tokenizer):
    """A word becomes 2^40 letters."""
    many = [normalizers.Replace("x", "xx") for _ in range(40)]
    tokenizer.normalizer = normalizers.Sequence(many)


def test_a_regular_expression_that_gives_up_is_an_error_of_the_data(tmp_path):
    tokenizer = load_tokenizer(str(tokenizer_file(tmp_path / "bad", backtracks)))
    with pytest.raises(DataError) as caught:
        tokenizer.encode_batch(["x" * 200])
    assert str(caught.value) == (
        "tokenizer bad failed on the text (Onig: Regex search error: retry-limit-in-match over); "
        "use another tokenizer, or mend its regular expressions"
    )
    (ids,) = tokenizer.encode_batch(["xy"])  # and goes on with other texts
    assert ids.tolist() == [1, 0]


def test_a_normaliser_that_explodes_is_an_error_of_the_data(tmp_path):
    tokenizer = load_tokenizer(str(tokenizer_file(tmp_path / "bad", doubles)))
    with pytest.raises(DataError, match=r"tokenizer bad could not encode 1 bytes within 512 MiB"):
        tokenizer.encode_batch(["x"])


def test_a_decoder_that_explodes_is_an_error_of_the_data(tmp_path):
    def change(tokenizer):
        tokenizer.decoder = decoders.Sequence([decoders.Replace("x", "xx") for _ in range(40)])

    tokenizer = load_tokenizer(str(tokenizer_file(tmp_path / "bad", change)))
    with pytest.raises(DataError, match=r"tokenizer bad could not decode 4 bytes within 512 MiB"):
        tokenizer.decode([1])


def test_a_build_with_such_a_tokenizer_leaves_nothing_behind(tmp_path):
    folder = tokenizer_file(tmp_path / "bad", backtracks)
    (tmp_path / "text.txt").write_text("x" * 300)
    with pytest.raises(DataError, match="tokenizer bad failed on the text"):
        build_dataset([tmp_path / "text.txt"], str(folder), tmp_path / "set")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "text.txt"]


@pytest.mark.parametrize("seed", range(2))
def test_ids_and_text_are_those_of_the_library(seed):
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdeé😀 \n", k=draw.randint(1, 9))) for _ in range(300)]
    texts = ["", *(" ".join(draw.choices(words, k=draw.randint(1, 200))) for _ in range(40))]
    trained = train_bpe(iter(texts), 400)
    library = Tokenizer.from_str(trained.to_json())
    library.encode_special_tokens = True
    expected = library.encode_batch_fast(texts, add_special_tokens=False)
    for ids, one, text in zip(trained.encode_batch(texts), expected, texts, strict=True):
        assert ids.tolist() == one.ids
        assert trained.decode(ids) == text


def test_its_process_ends_with_it():
    contained = ContainedTokenizer(json.dumps({}), "none")
    with pytest.raises(DataError, match="tokenizer none failed on the text"):
        contained.encode(["x"])
    tokenizer = train_bpe(iter(["water over the dam"]), 300)
    tokenizer.encode_batch(["water"])
    process = tokenizer._contained._process
    assert Path(f"/proc/{process.pid}").exists()
    del tokenizer
    gc.collect()
    assert process.returncode == 0


def test_a_process_that_was_killed_is_started_anew():
    tokenizer = train_bpe(iter(["water over the dam"]), 300)
    before = tokenizer.encode_batch(["water over"])[0].tolist()
    os.kill(tokenizer._contained._process.pid, 9)
    tokenizer._contained._process.wait()
    with pytest.raises(DataError) as caught:
        tokenizer.encode_batch(["water"])
    assert str(caught.value) == (
        f"tokenizer train-bpe:300 could not encode 5 bytes within {LEAST_BYTES >> 20} MiB of "
        "memory: its process ended with -9; use another tokenizer, or shorter documents"
    )
    assert tokenizer.encode_batch(["water over"])[0].tolist() == before
