"""Text to a data set: read, tokenise in batches, pack, split, and publish all or nothing.

The split is by document, from a hash of (seed, number of the document), so neither the order of
files nor their number matters to a document that keeps its number, and nothing is held in memory
to decide it. The first document always trains.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from penstock.data.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Manifest,
    Split,
    SplitRecord,
    TokenizerRecord,
    TokenType,
    dump_manifest,
)
from penstock.data.publish import published_folder
from penstock.data.shards import CHUNK_BYTES, SHARD_BYTES, ChecksummedFile, SplitWriter, cut_tail
from penstock.data.sources import Piece, find_files, read_pieces
from penstock.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe, train_size
from penstock.errors import ConfigError, DataError

# A tokenizer learns from at most about this much text, taken evenly from the whole: on 30 MB of
# source code, 4096 tokens learned from half of it make 0.5% more tokens than learned from all of
# it, and learning takes seconds whatever the size of the corpus.
TRAINING_BYTES = 2**24
BATCH_CHARACTERS = 2**22
BATCH_PIECES = 4096

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BuildReport:
    """What was built.

    Attributes:
        path: the folder of the data set.
        manifest: its manifest.
        files: number of files read.
        notes: what a person should know, one sentence each.
    """

    path: Path
    manifest: Manifest
    files: int
    notes: tuple[str, ...]


@dataclass
class _Corpus:
    """The input, to be gone through as often as needed."""

    files: list[Path]
    field: str
    on_progress: Progress
    total_bytes: int

    def pieces(self, phase: str) -> Iterator[Piece]:
        done = 0
        for path in self.files:
            for piece in read_pieces(path, self.field):
                yield piece
                done += piece.input_bytes
                self.on_progress(phase, min(done, self.total_bytes), self.total_bytes)
        self.on_progress(phase, self.total_bytes, self.total_bytes)


def build_dataset(
    inputs: Sequence[str | os.PathLike[str]],
    tokenizer: str,
    out: str | os.PathLike[str],
    *,
    validation: float = 0.05,
    seed: int = 0,
    field: str = "text",
    glob: str | None = None,
    exclude: Sequence[str] = (),
    overwrite: bool = False,
    on_progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> BuildReport:
    """Make a data set of `inputs` in the folder `out`.

    Args:
        inputs: text, .jsonl and .parquet files, and folders of them.
        tokenizer: `bytes`, `train-bpe:SIZE`, or the path of a tokenizer.
        out: the folder to make; it appears complete or not at all.
        validation: share of the documents that is held out, 0 (none) to less than 1.
        seed: decides which documents are held out.
        field: field or column with the text, in .jsonl and .parquet files.
        glob: pattern for the names of files inside folders.
        exclude: patterns for files and folders inside folders that are left out.
        overwrite: replace a data set that is there, in one atomic operation.
        on_progress: called with (phase, input bytes done, input bytes in all).
        shard_bytes: size of a shard file, a multiple of 4.
        chunk_bytes: how much one checksum covers, a multiple of 8.

    Returns:
        What was built.

    Raises:
        ConfigError: `validation`, `seed` or `tokenizer` is not of the form it must have.
        DataError: an input is missing, empty or broken, or `out` is taken.
        StorageError: the operating system refused to store something.
    """
    _check_arguments(validation, seed)
    out = Path(out)
    size = train_size(tokenizer)
    encoder = load_tokenizer(tokenizer) if size is None else None
    files = find_files(inputs, glob, exclude)
    _refuse_output_inside(inputs, out)
    total = sum(_size_bytes(path) for path in files)
    corpus = _Corpus(files, field, on_progress or (lambda *_: None), total)
    with published_folder(out, _is_dataset if overwrite else None) as folder:
        if encoder is None:
            assert size is not None
            encoder = train_bpe(_training_texts(corpus, seed), size)
        builder = _Builder(folder, encoder, seed, validation, shard_bytes, chunk_bytes)
        try:
            builder.add(corpus.pieces("tokenising"))
            manifest = builder.finish(corpus)
        finally:
            builder.abandon()
    notes = list(builder.notes)
    if size is not None and encoder.vocab_size < size:
        notes.append(
            f"the text gives a tokenizer of {encoder.vocab_size} tokens, fewer than the {size} "
            "wanted"
        )
    return BuildReport(out, manifest, len(files), tuple(notes))


def _check_arguments(validation: float, seed: int) -> None:
    if not 0 <= validation < 1:
        raise ConfigError(
            f"validation must be a share from 0 to less than 1, such as 0.05; got {validation}"
        )
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be from 0 to 2^63 - 1; got {seed}")


def _refuse_output_inside(inputs: Sequence[str | os.PathLike[str]], out: Path) -> None:
    real = Path(os.path.realpath(out))
    for one in inputs:
        folder = Path(os.path.realpath(one))
        if folder.is_dir() and real.is_relative_to(folder):
            raise DataError(
                f"the output folder {out} lies inside the input folder {one}, where the next "
                "build would read it as text; choose another output folder"
            )


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _is_dataset(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


def _hash_share(seed: int, number: int) -> float:
    """A number in [0, 1) that looks random and depends on (seed, number) alone."""
    key = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(key) / 2**64


def _training_texts(corpus: _Corpus, seed: int) -> Iterator[str]:
    share = TRAINING_BYTES / max(1, corpus.total_bytes)
    for number, piece in enumerate(corpus.pieces("training the tokenizer")):
        if _hash_share(seed, number) < share:
            yield piece.text


class _Builder:
    """Packs pieces into splits; holds one batch of text at a time."""

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
            split: SplitWriter(folder, split, self._dtype, shard_bytes, chunk_bytes)
            for split in ("train", "validation")
        }
        self._document = 0
        self._pending = 0  # tokens of the document that is being written
        self._text_bytes = 0

    def add(self, pieces: Iterator[Piece]) -> None:
        """Tokenise and write all `pieces`."""
        batch: list[Piece] = []
        characters = 0
        for piece in pieces:
            batch.append(piece)
            characters += len(piece.text)
            if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
                self._write(batch)
                batch, characters = [], 0
        self._write(batch)

    def _write(self, batch: list[Piece]) -> None:
        encoded = self._tokenizer.encode_batch([piece.text for piece in batch])
        for piece, ids in zip(batch, encoded, strict=True):
            if ids.size and ids.max() >= self._tokenizer.vocab_size:
                raise DataError(
                    f"{piece.record}: token id {ids.max()} is beyond the vocabulary of tokenizer "
                    f"{self._tokenizer.name}, ids 0-{self._tokenizer.vocab_size - 1}; the "
                    "tokenizer and its config.json do not belong together"
                )
            held_out = (
                self._document > 0 and _hash_share(self._seed, self._document) < self._validation
            )
            writer = self._writers["validation" if held_out else "train"]
            writer.append(ids)
            self._pending += ids.size
            self._text_bytes += len(piece.text.encode())
            if piece.ends_document and self._pending:
                writer.append(self._end)
                writer.end_document()
                self._document += 1
                self._pending = 0

    def finish(self, corpus: _Corpus) -> Manifest:
        """Write what is left, with a validation split in any case, and `dataset.json`."""
        if not self._document:
            many = len(corpus.files) > 1
            where = f"the {len(corpus.files)} input files" if many else f"{corpus.files[0]}"
            raise DataError(f"there is no text in {where}: no document that is not empty")
        splits: dict[Split, SplitRecord] = {"train": self._writers["train"].finish()}
        by: Literal["document", "tail", "none"] = "document" if self._validation else "none"
        writer = self._writers["validation"]
        if self._validation and not writer.documents:
            by = "tail"
            tail = max(1, int(splits["train"].tokens * self._validation))
            splits["train"] = cut_tail(
                self._folder,
                splits["train"],
                splits["train"].tokens - tail,
                writer,
                self._chunk_bytes,
            )
            have = "is one document" if self._document == 1 else f"are {self._document} documents"
            self.notes.append(
                f"there {have}, none of them held out; the last {tail} tokens are the validation "
                "split instead"
            )
        if self._validation:
            splits["validation"] = writer.finish()
        manifest = Manifest(
            format="penstock-dataset",
            version=1,
            vocab_size=self._tokenizer.vocab_size,
            dtype=self._dtype,
            chunk_bytes=self._chunk_bytes,
            seed=self._seed,
            validation_fraction=float(self._validation),
            validation_by=by,
            text_bytes=self._text_bytes,
            tokenizer=self._write_tokenizer(),
            splits=splits,
        )
        with (self._folder / MANIFEST_NAME).open("x", encoding="utf-8") as file:
            file.write(dump_manifest(manifest))
            file.flush()
            os.fsync(file.fileno())
        return manifest

    def _write_tokenizer(self) -> TokenizerRecord:
        kind: Literal["bytes", "file"] = "bytes"
        data = None
        if not isinstance(self._tokenizer, ByteTokenizer):
            kind = "file"
            file = ChecksummedFile(self._folder / TOKENIZER_NAME, self._chunk_bytes)
            file.write(self._tokenizer.to_json().encode())
            data = file.finish()
        return TokenizerRecord(
            kind=kind,
            name=self._tokenizer.name,
            end_of_document=self._tokenizer.end_of_document,
            data=data,
        )

    def abandon(self) -> None:
        """Close whatever files are still open."""
        for writer in self._writers.values():
            writer.abandon()
