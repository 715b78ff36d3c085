"""Packing of documents into splits: tokenise in batches, select held-out documents, write the
files.

A hash of (seed, number of the document) selects the split of each document. The selection therefore
does not depend on other files as long as a document keeps its number, and needs no memory. The
first document is always in the training split.
"""

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import xxhash

from penstock.data.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    VERSION,
    Content,
    Manifest,
    Split,
    SplitRecord,
    TokenizerRecord,
    TokenType,
    dump_manifest,
)
from penstock.data.shards import DataSetFile, SplitWriter, cut_tail, read_tokens
from penstock.data.sources import Pair, TextPiece
from penstock.data.tokenizers import ByteTokenizer, Tokenizer
from penstock.errors import DataError
from penstock.io import durable

BATCH_CHARACTERS = 2**22
BATCH_PARTS = 4096

HeldOutBy = Literal["document", "tail", "none"]
_Part = TypeVar("_Part", TextPiece, Pair)
_Record = tuple[np.ndarray, int, int]  # all its tokens; the number of prompt tokens; text bytes


def hash_share(seed: int, number: int) -> float:
    """Return a pseudo-random number in [0, 1) that depends only on (seed, number)."""
    key = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(key) / 2**64


class Packer(ABC, Generic[_Part]):
    """Base of packing for text and records; holds one batch of text at a time.

    Args:
        folder: the folder of the files; it must exist.
        tokenizer: produces the tokens.
        seed, validation: select the held-out documents, and their share.
        shard_bytes, chunk_bytes: as for `SplitWriter`.

    Attributes:
        content: the kind of its documents.
        notes: messages for the user, one sentence each.
    """

    content: Content

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        seed: int,
        validation: float,
        shard_bytes: int,
        chunk_bytes: int,
    ) -> None:
        self.notes: list[str] = []
        self._folder = folder
        self._tokenizer = tokenizer
        self._seed = seed
        self._validation = validation
        self._chunk_bytes = chunk_bytes
        self._dtype: TokenType = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        self._end = np.array([tokenizer.end_of_document], dtype=np.uint32)
        self._writers = {
            split: SplitWriter(folder, split, self._dtype, shard_bytes, chunk_bytes, self.content)
            for split in ("train", "validation")
        }
        self._documents = 0
        self._text_bytes: dict[Split, int] = {"train": 0, "validation": 0}

    def add(self, parts: Iterable[_Part]) -> None:
        """Tokenise and write all `parts`."""
        batch: list[_Part] = []
        characters = 0
        for part in parts:
            batch.append(part)
            characters += self._characters(part)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PARTS:
                self._write(batch)
                batch, characters = [], 0
        self._write(batch)

    def finish(self, where: str) -> Manifest:
        """Write the remaining data and `dataset.json`; `where` names the input in messages."""
        if not self._documents:
            raise DataError(self._empty_input(where))
        splits, by = self._finish_splits()
        splits = {
            name: split.model_copy(update={"text_bytes": self._text_bytes[name]})
            for name, split in splits.items()
        }
        manifest = Manifest(
            format="penstock-dataset",
            version=VERSION,
            content=self.content,
            vocab_size=self._tokenizer.vocab_size,
            dtype=self._dtype,
            chunk_bytes=self._chunk_bytes,
            seed=self._seed,
            validation_fraction=float(self._validation),
            validation_by=by,
            text_bytes=sum(self._text_bytes.values()),
            tokenizer=self._write_tokenizer(),
            splits=splits,
        )
        durable.write_file(self._folder / MANIFEST_NAME, dump_manifest(manifest).encode())
        return manifest

    def abandon(self) -> None:
        """Close all open files."""
        for writer in self._writers.values():
            writer.abandon()

    @abstractmethod
    def _characters(self, part: _Part) -> int: ...

    @abstractmethod
    def _write(self, batch: Sequence[_Part]) -> None: ...

    @abstractmethod
    def _finish_splits(self) -> tuple[dict[Split, SplitRecord], HeldOutBy]: ...

    @abstractmethod
    def _empty_input(self, where: str) -> str: ...

    def _encode(self, batch: Sequence[_Part], text: Callable[[_Part], str]) -> Iterator[np.ndarray]:
        encoded = self._tokenizer.encode_batch([text(part) for part in batch])
        for part, ids in zip(batch, encoded, strict=True):
            if ids.size and ids.max() >= self._tokenizer.vocab_size:
                raise DataError(
                    f"{part.record}: token id {ids.max()} is beyond the vocabulary of tokenizer "
                    f"{self._tokenizer.name}, ids 0-{self._tokenizer.vocab_size - 1}; the "
                    "tokenizer and its config.json do not belong together"
                )
            yield ids

    def _split_of_document(self) -> Split:
        """The split of the document whose number is the count of the documents so far."""
        share = hash_share(self._seed, self._documents)
        return "validation" if self._documents and share < self._validation else "train"

    def _write_tokenizer(self) -> TokenizerRecord:
        kind: Literal["bytes", "file"] = "bytes"
        data = None
        if not isinstance(self._tokenizer, ByteTokenizer):
            kind = "file"
            file = DataSetFile(self._folder / TOKENIZER_NAME, self._chunk_bytes)
            try:
                file.write(self._tokenizer.to_json().encode())
                data = file.finish()
            finally:
                file.abandon()
        return TokenizerRecord(
            kind=kind,
            name=self._tokenizer.name,
            end_of_document=self._tokenizer.end_of_document,
            data=data,
        )


class TextPacker(Packer[TextPiece]):
    """Packs plain text, which arrives in pieces of documents."""

    content: Content = "text"
    _pending = 0  # tokens of the document that is being written

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Where each piece of the training split begins, in tokens and in text bytes, as long as no
        # document is held out: the text bytes of a tail are found from them.
        self._piece_tokens, self._piece_bytes = array("Q"), array("Q")

    def _characters(self, part: TextPiece) -> int:
        return len(part.text)

    def _write(self, batch: Sequence[TextPiece]) -> None:
        for piece, ids in zip(batch, self._encode(batch, lambda p: p.text), strict=True):
            split = self._split_of_document()
            writer = self._writers[split]
            if split == "train":
                self._note_piece()
            writer.append(ids)
            self._pending += ids.size
            self._text_bytes[split] += len(piece.text.encode())
            if piece.ends_document and self._pending:
                writer.append(self._end)
                writer.end_document()
                self._documents += 1
                self._pending = 0

    def _note_piece(self) -> None:
        """Record where a piece of the training split begins, while a tail may be held out."""
        if self._validation and not self._writers["validation"].documents:
            self._piece_tokens.append(self._writers["train"].tokens)
            self._piece_bytes.append(self._text_bytes["train"])

    def _text_bytes_before(self, position: int, train: SplitRecord) -> int:
        """Return the text bytes of the first `position` tokens of the whole training split.

        Only the piece around the position is read. If the tokenizer does not restore its text
        exactly, the bytes of the piece are divided in proportion.
        """
        self._note_piece()  # the end
        number = bisect_right(self._piece_tokens, position) - 1
        start, stop = self._piece_tokens[number : number + 2]
        before, after = self._piece_bytes[number : number + 2]
        ids = read_tokens(self._folder, train, start, stop)
        whole = self._tokenizer.text_bytes(ids)
        part = self._tokenizer.text_bytes(ids[: position - start])
        return before + ((after - before) * part // whole if whole else 0)

    def _finish_splits(self) -> tuple[dict[Split, SplitRecord], HeldOutBy]:
        splits: dict[Split, SplitRecord] = {"train": self._writers["train"].finish()}
        by: HeldOutBy = "document" if self._validation else "none"
        writer = self._writers["validation"]
        if self._validation and not writer.documents:
            by = "tail"
            tail = max(1, int(splits["train"].tokens * self._validation))
            kept = splits["train"].tokens - tail
            kept_bytes = self._text_bytes_before(kept, splits["train"])
            all_bytes = sum(self._text_bytes.values())
            self._text_bytes = {"train": kept_bytes, "validation": all_bytes - kept_bytes}
            splits["train"] = cut_tail(
                self._folder, splits["train"], kept, writer, self._chunk_bytes
            )
            last = "last token is" if tail == 1 else f"last {tail:,} tokens are"
            if self._documents == 1:
                self.notes.append(f"the text is one document: its {last} the validation split")
            else:
                self.notes.append(
                    f"none of the {self._documents:,} documents was selected as held-out data; the "
                    f"{last} the validation split instead"
                )
        if self._validation:
            splits["validation"] = writer.finish()
        return splits, by

    def _empty_input(self, where: str) -> str:
        return f"there is no text in {where}: every document is empty"


class RecordPacker(Packer[Pair]):
    """Packs prompts with their completions; each record is a document.

    Prompt and completion are tokenised separately, so that no token crosses the border. The
    end-of-document token follows the completion and belongs to it: a model learns to stop there.
    The same token replaces an empty prompt, since at least one token must precede the first
    predicted token.
    """

    content: Content = "records"
    # The newest training record is kept back: it becomes the validation split if no other record
    # does.
    _last: _Record | None = None

    def _characters(self, part: Pair) -> int:
        return len(part.prompt) + len(part.completion)

    def _write(self, batch: Sequence[Pair]) -> None:
        prompts = self._encode(batch, lambda pair: pair.prompt)
        completions = self._encode(batch, lambda pair: pair.completion)
        for pair, prompt, completion in zip(batch, prompts, completions, strict=True):
            if not completion.size:
                raise DataError(
                    f"{pair.record}: tokenizer {self._tokenizer.name} encodes no token for the "
                    f"completion {pair.completion[:40]!r}: there is nothing to learn; remove the "
                    "record"
                )
            before = prompt if prompt.size else self._end
            ready: _Record | None = (
                np.concatenate([before, completion, self._end]),
                before.size,
                len(pair.prompt.encode()) + len(pair.completion.encode()),
            )
            split = self._split_of_document()
            self._documents += 1
            if split == "train":
                ready, self._last = self._last, ready
            if ready is not None:
                self._put(split, *ready)

    def _put(self, split: Split, tokens: np.ndarray, prompt_tokens: int, text_bytes: int) -> None:
        self._writers[split].append(tokens)
        self._writers[split].end_document(prompt_tokens)
        self._text_bytes[split] += text_bytes

    def _finish_splits(self) -> tuple[dict[Split, SplitRecord], HeldOutBy]:
        assert self._last is not None, "the first record always trains"
        none = self._validation > 0 and not self._writers["validation"].documents
        if none and self._documents > 1:
            self._put("validation", *self._last)
            self.notes.append(
                f"none of the {self._documents:,} records was selected as held-out data; the last "
                "one is the validation split instead"
            )
        else:
            self._put("train", *self._last)
            if none:
                self.notes.append("there is one record: none is held out")
        splits: dict[Split, SplitRecord] = {"train": self._writers["train"].finish()}
        if not self._writers["validation"].documents:
            return splits, "none"
        splits["validation"] = self._writers["validation"].finish()
        return splits, "document"

    def _empty_input(self, where: str) -> str:
        return f"there is no record in {where}"
