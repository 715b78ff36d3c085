"""A tokenizer of somebody else's making can fail, panic or ask for all memory; the run cannot."""

import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from waiting import wait_until

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


def test_failing_regular_expression_is_a_data_error(tmp_path):
    tokenizer = load_tokenizer(str(tokenizer_file(tmp_path / "bad", backtracks)))
    with pytest.raises(DataError) as caught:
        tokenizer.encode_batch(["x" * 200])
    assert str(caught.value) == (
        "tokenizer bad failed on the text (Onig: Regex search error: retry-limit-in-match over); "
        "use another tokenizer, or correct its regular expressions"
    )
    (ids,) = tokenizer.encode_batch(["xy"])  # and goes on with other texts
    assert ids.tolist() == [1, 0]


@pytest.mark.long
def test_exploding_normaliser_is_a_data_error(tmp_path):
    tokenizer = load_tokenizer(str(tokenizer_file(tmp_path / "bad", doubles)))
    with pytest.raises(DataError, match=r"tokenizer bad could not encode 1 bytes within 512 MiB"):
        tokenizer.encode_batch(["x"])


@pytest.mark.long
def test_exploding_decoder_is_a_data_error(tmp_path):
    def change(tokenizer):
        tokenizer.decoder = decoders.Sequence([decoders.Replace("x", "xx") for _ in range(40)])

    tokenizer = load_tokenizer(str(tokenizer_file(tmp_path / "bad", change)))
    with pytest.raises(DataError, match=r"tokenizer bad could not decode 4 bytes within 512 MiB"):
        tokenizer.decode([1])


def test_build_with_exploding_tokenizer_leaves_no_file(tmp_path):
    folder = tokenizer_file(tmp_path / "bad", backtracks)
    (tmp_path / "text.txt").write_text("x" * 300)
    with pytest.raises(DataError, match="tokenizer bad failed on the text"):
        build_dataset([tmp_path / "text.txt"], str(folder), tmp_path / "set")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "text.txt"]


@pytest.mark.parametrize("seed", range(2))
def test_ids_and_text_equal_the_library(seed):
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


def test_process_that_cannot_be_started_is_named(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(DataError) as caught:
        ContainedTokenizer("{}", "words").encode(["x"])
    assert str(caught.value) == (
        "the process of tokenizer words did not start: Too many open files"
    )


def test_tokenizer_process_ends_with_its_object():
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


def test_killed_tokenizer_process_is_restarted():
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


def test_unread_answer_after_interrupt_is_discarded():
    """As in a notebook, where the interrupt reaches one process and the next cell goes on."""
    tokenizer = train_bpe(iter(["water over the dam"]), 300)
    before = tokenizer.encode_batch(["dam"])[0].tolist()

    def encode_until_interrupted():
        while True:
            tokenizer.encode_batch(["water " * 200_000])

    # A shell that starts the tests in the background has them ignore SIGINT.
    before_test = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            encode_until_interrupted()
    finally:
        signal.signal(signal.SIGINT, before_test)
    assert tokenizer.encode_batch(["dam"])[0].tolist() == before


def test_tokenizer_process_ignores_interrupts():
    tokenizer = train_bpe(iter(["water over the dam"]), 300)
    before = tokenizer.encode_batch(["dam"])[0].tolist()
    tokenizer._contained._process.send_signal(signal.SIGINT)
    assert tokenizer.encode_batch(["dam"])[0].tolist() == before


def test_refused_tokenizer_is_refused_again():
    contained = ContainedTokenizer(json.dumps({}), "none")
    told = []
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            contained.encode(["x"])
        told.append(str(caught.value))
    assert told[0] == told[1]


# Its normaliser takes minutes for the second text.
_ENDLESS = """
from tokenizers import Tokenizer, models, normalizers
from penstock.data.contained_tokenizer import ContainedTokenizer
tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
there_and_back = [normalizers.Replace("a", "b"), normalizers.Replace("b", "a")]
tokenizer.normalizer = normalizers.Sequence(there_and_back * 2000)
contained = ContainedTokenizer(tokenizer.to_str(), "endless")
contained.encode(["a"])
print(contained._process.pid, flush=True)
contained.encode(["a" * 400_000])
"""


def test_tokenizer_process_ends_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", _ENDLESS], stdout=subprocess.PIPE) as asks:
        worker = int(asks.stdout.readline())
        wait_until(lambda: processor_seconds(worker) > 1, "the second text is being encoded")
        asks.kill()
    wait_until(lambda: processor_seconds(worker) is None, "its process ends")


def processor_seconds(pid):
    """The seconds for which a process has computed; None once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return None if fields[0] == "Z" else ticks / os.sysconf("SC_CLK_TCK")
