"""Text to token ids and back: raw bytes, a byte-level BPE trained here, or any tokenizer.json.

Text never contains special tokens. The name of a special token inside a document (for example
`<|endoftext|>`) is encoded like any other characters, so that no document can forge a boundary.
Only Penstock adds special tokens, as ids.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from penstock.data.contained_tokenizer import ContainedTokenizer
from penstock.data.integrity import read_checked
from penstock.data.manifest import MANIFEST_NAME, TOKENIZER_NAME, load_manifest
from penstock.errors import ConfigError, DataError, did_you_mean
from penstock.io import read_plain

if TYPE_CHECKING:
    import tokenizers as library

END_OF_TEXT = "<|endoftext|>"
BYTE_VOCABULARY = 257
LARGEST_VOCABULARY = 2**24
LARGEST_FILE_BYTES = 2**30  # a vocabulary of a million tokens takes some 50 MB
# Usual names of the end-of-document token in tokenizers that do not name their own.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
_ENCODING_RULES = ("normalizer", "pre_tokenizer", "model", "added_tokens")
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
        name: the name shown to users.
        vocab_size: ids are 0 ... vocab_size - 1.
        end_of_document: the id that follows every document.
    """

    name: str
    vocab_size: int
    end_of_document: int

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int [n]; no special token is added."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    def text_bytes(self, ids: np.ndarray) -> int:
        """Return the UTF-8 bytes of the text of `ids`; an end of a document has none.

        `ids` may begin or end inside a character.
        """

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name (`[MASK]`), or None."""

    def to_json(self) -> str:
        """Return the content of a `tokenizer.json` that encodes as this tokenizer does."""


class ByteTokenizer:
    """The 256 byte values of UTF-8, and 256 for the end of a document."""

    name = "bytes"
    vocab_size = BYTE_VOCABULARY
    end_of_document = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the UTF-8 bytes of each text, uint8 [n]."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        array = _checked(ids, self)
        parts = np.split(array, np.flatnonzero(array == self.end_of_document))
        texts = [
            part[part != self.end_of_document].astype(np.uint8).tobytes().decode(errors="replace")
            for part in parts
        ]
        return END_OF_TEXT.join(texts)

    def text_bytes(self, ids: np.ndarray) -> int:
        """Return the number of `ids` that are bytes."""
        return int(np.count_nonzero(ids != self.end_of_document))

    def token_id(self, token: str) -> int | None:
        """Return the id of the end of text; no other token has a name."""
        return self.end_of_document if token == END_OF_TEXT else None

    def to_json(self) -> str:
        """Return the same tokenizer for other tools: a byte-level BPE without merges."""
        from tokenizers import AddedToken, Tokenizer as Library, decoders, models, pre_tokenizers

        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        tokenizer = Library(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
        return tokenizer.to_str(pretty=True)


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, as in `tokenizer.json`.

    It encodes and decodes in a separate process, since the file is untrusted.

    Args:
        tokenizer: the library's object; its padding and truncation are switched off.
        name: the name shown to users.
        end_of_document: the id of the token that ends a document.
        vocab_size: a limit below the tokenizer's own vocabulary, from the model's configuration.
    """

    def __init__(
        self,
        tokenizer: "library.Tokenizer",
        name: str,
        end_of_document: int,
        vocab_size: int | None = None,
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._json = tokenizer.to_str(pretty=True)
        self._contained = ContainedTokenizer(self._json, name)
        self.name = name
        # Not the number of tokens: ids may have gaps.
        own = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.vocab_size = min(own, vocab_size or own)
        self.end_of_document = end_of_document

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32 [n]; no special token is added."""
        return self._contained.encode(texts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self._contained.decode(_checked(ids, self))

    def text_bytes(self, ids: np.ndarray) -> int:
        """Return the UTF-8 bytes of the text of `ids`; an end of a document has none.

        `ids` may begin or end inside a character. The result is exact for byte-level tokens. For
        other tokens it is the length of the decoded text, which may differ from the original.
        """
        from tokenizers import decoders

        kept = ids[ids != self.end_of_document]
        if not isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return len(self.decode(kept).encode())
        added = self._tokenizer.get_added_tokens_decoder()
        total = 0
        for number, count in zip(*np.unique_counts(kept), strict=True):
            if int(number) in added:
                total += len(added[int(number)].content.encode()) * int(count)
            else:  # each character of the token's name stands for one byte
                total += len(self._tokenizer.id_to_token(int(number)) or "") * int(count)
        return total

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its name, or None."""
        return self._tokenizer.token_to_id(token)

    def to_json(self) -> str:
        """Return the content of `tokenizer.json`."""
        return self._json


def encodes_as(tokenizer: Tokenizer, folder: Path) -> bool:
    """Return whether `tokenizer` and the tokenizer in a folder turn every text into the same ids.

    Names, templates of whole prompts and the end-of-document token are not compared. A folder
    without a tokenizer.json has no difference.

    Raises:
        DataError: the folder's tokenizer cannot be read.
    """
    file = folder / TOKENIZER_NAME
    try:
        other = _parse(read_plain(file, LARGEST_FILE_BYTES), file)
    except FileNotFoundError:
        return True
    except OSError as error:
        raise DataError(f"cannot read tokenizer {file}: {error.strerror}") from None
    return _rules(tokenizer.to_json()) == _rules(other.to_str())


def _rules(content: str) -> dict[str, Any]:
    found = json.loads(content)
    return {key: found.get(key) for key in _ENCODING_RULES}


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of the rules by which a tokenizer turns text into ids.

    Names, templates of whole prompts and the end-of-document token are not part of it.
    """
    rules = _without_defaults(_rules(tokenizer.to_json()))
    canonical = json.dumps(rules, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def _without_defaults(value: Any) -> Any:
    """Return JSON without null and false fields, which newer releases of `tokenizers` add."""
    if isinstance(value, list):  # of merges, of which there may be 100,000, or of objects
        return [_without_defaults(each) if isinstance(each, dict) else each for each in value]
    if not isinstance(value, dict):
        return value
    fields = {key: _without_defaults(field) for key, field in value.items()}
    return {k: field for k, field in fields.items() if field is not None and field is not False}


def export_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int | None = None) -> None:
    """Write `tokenizer` into `folder` so that `AutoTokenizer.from_pretrained` loads it.

    Byte tokens become a byte-level BPE without merges: the same ids for the same text. With
    `max_length`, the tokenizer truncates to the model's number of tokens and warns beyond it.
    """
    (folder / TOKENIZER_NAME).write_text(tokenizer.to_json(), encoding="utf-8")
    end = tokenizer.decode([tokenizer.end_of_document])
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": end,
        "clean_up_tokenization_spaces": False,
        **({} if max_length is None else {"model_max_length": max_length}),
    }
    (folder / CONFIG_FILES[0]).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _checked(ids: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    array = np.asarray(ids, dtype=np.int64)
    beyond = array[(array < 0) | (array >= tokenizer.vocab_size)]
    if beyond.size:
        raise DataError(
            f"token id {beyond[0]} has no text: tokenizer {tokenizer.name} has ids "
            f"0-{tokenizer.vocab_size - 1}"
        )
    return array


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def train_size(spec: str) -> int | None:
    """Return SIZE of `train-bpe:SIZE`, or None if `spec` has another form.

    Raises:
        ConfigError: SIZE is not a valid size of a byte-level vocabulary.
    """
    if spec.partition(":")[0] != "train-bpe":
        return None
    text = spec.partition(":")[2]
    size = int(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0
    if not BYTE_VOCABULARY <= size <= LARGEST_VOCABULARY:
        raise ConfigError(
            f"tokenizer {spec!r}: expected train-bpe:SIZE with SIZE from {BYTE_VOCABULARY} (every "
            f"byte and the end of text) to {LARGEST_VOCABULARY}, such as train-bpe:4096"
        )
    return size


def train_bpe(texts: Iterator[str], size: int) -> FileTokenizer:
    """Train a byte-level BPE of at most `size` tokens, one of which is `<|endoftext|>`.

    Words are split as in GPT-2. A text with too few merges gives fewer tokens. The same texts give
    the same tokenizer.
    """
    from tokenizers import Tokenizer as Library, decoders, models, pre_tokenizers, trainers

    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    failure: list[BaseException] = []

    def guarded() -> Iterator[str]:
        # The library wraps an iterator's exception in an exception of its own.
        try:
            yield from texts
        except BaseException as error:
            failure.append(error)

    tokenizer.train_from_iterator(guarded(), trainer=trainer)
    if failure:
        raise failure[0]
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None, "special tokens come first in the vocabulary"
    return FileTokenizer(tokenizer, f"train-bpe:{size}", end)


def unused_ids(model_vocab_size: int, vocab_size: int) -> int:
    """Return how many ids of a model a tokenizer never uses; 0 up to an eighth, as padding is."""
    spare = model_vocab_size - vocab_size
    return spare if spare > model_vocab_size / 8 else 0


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer that `spec` names.

    Args:
        spec: `bytes`, the path of a tokenizer.json, or of a folder with one in it: a Hugging Face
            model or tokenizer, or a data set, whose tokenizer is reused.

    Raises:
        DataError: there is no such file, it is corrupt, or it has no end-of-document token.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir() and (path / MANIFEST_NAME).is_file():
        return dataset_tokenizer(path)
    file = path / TOKENIZER_NAME if path.is_dir() else path
    if not path.exists():
        known = ["bytes", "train-bpe:4096"]
        with contextlib.suppress(OSError):
            known += [str(path.parent / entry.name) for entry in path.parent.iterdir()]
        raise DataError(
            f"tokenizer {spec!r} does not exist{did_you_mean(spec, known)}; expected bytes, "
            "train-bpe:SIZE, or the path of a tokenizer.json or of a folder with one"
        )
    if not file.exists():
        raise DataError(
            f"folder {path} holds no {TOKENIZER_NAME}; write one with transformers: "
            "AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER); or name another, such as "
            "train-bpe:4096 or the path of a tokenizer.json"
        )
    try:
        content = read_plain(file, LARGEST_FILE_BYTES)
    except OSError as error:
        raise DataError(f"cannot read tokenizer {file}: {error.strerror}") from None
    tokenizer = _parse(content, file)
    end = _end_token(tokenizer, file)
    limit = _json_file(file.parent / "config.json").get("vocab_size")
    loaded = FileTokenizer(tokenizer, path.name, end, limit if isinstance(limit, int) else None)
    if loaded.end_of_document >= loaded.vocab_size:
        raise DataError(
            f"tokenizer {file}: the token that ends a document has id "
            f"{loaded.end_of_document}, config.json beside it allows ids below {limit}"
        )
    return loaded


def dataset_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that produced the data set in `folder`."""
    manifest, _ = load_manifest(folder)
    if manifest.tokenizer.kind == "bytes":
        return ByteTokenizer()
    record = manifest.tokenizer.data
    assert record is not None, "the manifest's rules"
    content = read_checked(folder, record, manifest.chunk_bytes)
    tokenizer = _parse(content.tobytes(), folder / record.file)
    end = manifest.tokenizer.end_of_document
    return FileTokenizer(tokenizer, manifest.tokenizer.name, end, manifest.vocab_size)


def _parse(content: bytes, file: Path) -> "library.Tokenizer":
    from tokenizers import Tokenizer as Library

    try:
        tokenizer = Library.from_str(content.decode())
    except Exception as error:  # the library raises no narrower class
        raise DataError(f"{file} is not a tokenizer of the `tokenizers` library: {error}") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= LARGEST_VOCABULARY:  # the library allocates memory up to the largest id
        raise DataError(
            f"{file} has a token with id {largest}; expected ids below {LARGEST_VOCABULARY}"
        )
    return tokenizer


def _json_file(path: Path) -> dict[str, Any]:
    """The object in an optional JSON file."""
    try:
        content = json.loads(read_plain(path, LARGEST_FILE_BYTES))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"cannot read {path} beside the tokenizer: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path} beside the tokenizer: {error}") from None
    return content if isinstance(content, dict) else {}


def _end_token(tokenizer: "library.Tokenizer", file: Path) -> int:
    """The end-of-document token: from the files beside the tokenizer, else a well-known name."""
    named = []
    for name in CONFIG_FILES:
        token = _json_file(file.parent / name).get("eos_token")
        named.append(token.get("content") if isinstance(token, dict) else token)
    for token in [*named, *KNOWN_ENDS]:
        number = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if number is not None:
            return number
    raise DataError(
        f"tokenizer {file} has no end-of-document token; name one as eos_token in a "
        f"tokenizer_config.json beside it (looked for {', '.join(KNOWN_ENDS)})"
    )
