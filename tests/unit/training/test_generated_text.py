"""The text that generation yields after a prompt, for tokenizers whose decoders differ."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as Library, decoders, models, normalizers, pre_tokenizers

from penstock.data import ByteTokenizer
from penstock.data.tokenizers import FileTokenizer, train_bpe
from penstock.training import token_generation
from penstock.training.text_generation import TextGenerator
from penstock.training.token_generation import TokenGenerator

WORDS = ["Once", "upon", "time", "a", "water"]
PIECES = ["Once", "upon", " a", " ", "  ", "time", "é", "東京", "🚀", "\n", ", ", "water"]


def sentencepiece(normalizer, pre_tokenizer, decoder):
    """Return a tokenizer as of Llama 2: `▁` is a space, unknown characters are bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", *sorted(set("".join(WORDS)))]
    merges: dict[tuple[str, str], None] = {}
    for word in ["▁▁", *WORDS, *(f"▁{word}" for word in WORDS)]:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
    names += dict.fromkeys("".join(pair) for pair in merges)
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    model = models.BPE(
        vocab=vocabulary,
        merges=list(merges),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    library = Library(model)
    library.normalizer, library.pre_tokenizer, library.decoder = normalizer, pre_tokenizer, decoder
    return FileTokenizer(library, "sentencepiece", vocabulary["</s>"])


def llama():
    return sentencepiece(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    )


def metaspace():
    return sentencepiece(
        None,
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]),
    )


TOKENIZERS = {
    "llama": llama,
    "metaspace": metaspace,
    "byte-level": lambda: train_bpe(iter([" ".join(WORDS * 20)]), 290),
    "bytes": ByteTokenizer,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def spaced():
    return llama()


@pytest.fixture
def pieces(monkeypatch):
    """Return what generation yields if the model chooses these tokens."""

    def of(tokenizer, prompt, tokens):
        monkeypatch.setattr(token_generation, "generate_tokens", lambda *_, **__: iter(tokens))
        engine = SimpleNamespace(program=None, release=lambda: None)
        generator = TokenGenerator(lambda goal, window: engine, lambda names: [], 64)
        options = {"max_new_tokens": len(tokens), "temperature": 0.0, "top_k": None, "seed": 0}
        return list(TextGenerator(generator, tokenizer).write(prompt, **options))

    return of


def ids(tokenizer, *names):
    return [tokenizer.token_id(name) for name in names]


def test_space_after_the_prompt_is_kept(spaced, pieces):
    tokens = ids(spaced, "▁time", "▁upon", "▁a")
    assert pieces(spaced, "Once upon a", tokens) == [" time", " upon", " a"]


def test_prompt_that_ends_in_a_space_gets_no_second_one(spaced, pieces):
    assert pieces(spaced, "Once upon a ", ids(spaced, "time", "▁upon")) == ["time", " upon"]
    assert pieces(spaced, "Once upon a ", ids(spaced, "▁time")) == [" time"]


def test_text_after_an_empty_prompt_begins_without_a_space(spaced, pieces):
    assert pieces(spaced, "", ids(spaced, "▁Once", "▁upon")) == ["Once", " upon"]


def test_byte_level_text_after_an_empty_prompt_keeps_its_space(pieces):
    tokenizer = TOKENIZERS["byte-level"]()
    tokens = tokenizer.encode_batch([" water"])[0].tolist()
    assert "".join(pieces(tokenizer, "", tokens)) == " water"


def test_character_is_yielded_when_its_last_byte_has_come(spaced, pieces):
    rocket = [f"<0x{byte:02X}>" for byte in "🚀".encode()]
    assert pieces(spaced, "a", ids(spaced, "▁a", *rocket, "▁a")) == [" a", "🚀", " a"]
    assert pieces(spaced, "a", ids(spaced, "▁a", *rocket[:3])) == [" a"]


@pytest.mark.parametrize("prompt", ["é", "a"])
def test_bytes_that_are_no_text_leave_the_characters_before_them(spaced, pieces, prompt):
    tokens = ids(spaced, "<0xC3>", "<0xA9>", "<0xFF>", "▁a")
    assert pieces(spaced, prompt, tokens) == ["é", "\ufffd a"]


@pytest.mark.parametrize("seed", range(3))
def test_prompt_and_pieces_are_the_decoded_text(tokenizer, pieces, seed):
    text = "".join(random.Random(seed).choices(PIECES, k=12))
    tokens = tokenizer.encode_batch([text])[0].tolist()
    checked = 0
    for end in range(len(tokens)):
        prompt = tokenizer.decode(tokens[:end]) if end else ""
        if tokenizer.encode_batch([prompt])[0].tolist() == tokens[:end]:
            found = "".join(pieces(tokenizer, prompt, tokens[end:]))
            assert prompt + found == tokenizer.decode(tokens), (seed, end)
            checked += 1
    assert checked > 3


def test_a_token_costs_the_same_wherever_it_is_in_the_text(spaced, pieces, monkeypatch):
    sizes = []
    decode = spaced.decode
    monkeypatch.setattr(spaced, "decode", lambda ids: sizes.append(len(ids)) or decode(ids))
    assert "".join(pieces(spaced, "Once upon a", ids(spaced, "▁time") * 100)) == " time" * 100
    assert max(sizes[-100:]) <= 2
