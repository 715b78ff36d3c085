"""Reading a data set: tokens by position, memory-mapped; each chunk is verified before its first
use.

Opening reads only `dataset.json` and file sizes. No token is returned from a chunk whose checksum
has not been compared in this process.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from penstock.data.built_from import read_built_from
from penstock.data.integrity import CheckedFile, check_size, read_checked, release_pages
from penstock.data.manifest import (
    INDEX_ENTRY_BYTES,
    MANIFEST_NAME,
    VERSION,
    Content,
    Manifest,
    ShardRecord,
    advice_for,
    load_manifest,
)
from penstock.data.record_index import RecordIndex
from penstock.data.tokenizers import Tokenizer, dataset_tokenizer
from penstock.errors import CorruptionError, DataError, did_you_mean


class TokenDataset:
    """A data set on disk, opened with `TokenDataset.open` or `TokenDataset.described`.

    Attributes:
        path: its folder.
        manifest: the content of `dataset.json`.
        fingerprint: identifies the content: equal for equal data sets, whatever their paths.
    """

    def __init__(self, path: Path, manifest: Manifest, fingerprint: str) -> None:
        self.path = path
        self.manifest = manifest
        self.fingerprint = fingerprint
        self._splits = {
            name: _Split(path, split.shards, manifest) for name, split in manifest.splits.items()
        }
        self._indexes: dict[str, RecordIndex] = {}
        if manifest.content == "records":
            self._indexes = {
                name: RecordIndex(path, split.shards, manifest.chunk_bytes)
                for name, split in manifest.splits.items()
            }

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = False) -> "TokenDataset":
        """Open the data set in the folder `path`.

        Args:
            path: a folder created by `penstock data build`.
            verify: verify every byte now. Otherwise sizes are checked now, and each chunk before
                its first use.

        Raises:
            DataError: there is no data set at `path`.
            CorruptionError: a file is missing, has a wrong size or fails its checksum.
        """
        dataset = cls.described(path)
        dataset.check_sizes()
        if verify:
            dataset.verify()
        return dataset

    @classmethod
    def described(cls, path: str | os.PathLike[str]) -> "TokenDataset":
        """Open the data set in the folder `path`, each file of which is checked when it is read.

        Raises:
            DataError: there is no data set at `path`.
            CorruptionError: its description is damaged.
        """
        folder = Path(path)
        if not folder.exists():
            siblings = [entry.name for entry in folder.parent.glob("*") if entry.is_dir()]
            raise DataError(
                f"data set {folder} does not exist{did_you_mean(folder.name, siblings)}; make one "
                f"with: penstock data build --input FILES... --tokenizer bytes --out {folder}"
            )
        if not (folder / MANIFEST_NAME).exists():
            raise DataError(
                f"{folder} is not a data set: it has no {MANIFEST_NAME}; make one with: "
                f"penstock data build --input {folder} --tokenizer bytes --out DIR"
            )
        return cls(folder, *load_manifest(folder))

    def check_sizes(self) -> None:
        """Raise `CorruptionError` if a file is missing or has a wrong size."""
        for record in self.manifest.files():
            check_size(self.path, record)

    @property
    def vocab_size(self) -> int:
        """Number of possible token ids."""
        return self.manifest.vocab_size

    @property
    def content(self) -> Content:
        """The kind of its documents: `text`, or `records` of a prompt and a completion."""
        return self.manifest.content

    @property
    def read_each_file_once(self) -> bool:
        """Whether its build surely read each input file once; older releases did not ensure it."""
        return self.manifest.version == VERSION

    @property
    def end_of_document(self) -> int:
        """The id that follows every document."""
        return self.manifest.tokenizer.end_of_document

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits: `train`, and `validation` if there is one."""
        return tuple(self._splits)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per token, on average, including end-of-document tokens."""
        return self.manifest.text_bytes / sum(s.tokens for s in self.manifest.splits.values())

    def text_bytes(self, split: str) -> int | None:
        """Return the UTF-8 bytes of the text of `split`.

        None for data sets that an older release built with two splits: they contain only the sum.
        """
        self._split(split)
        if len(self._splits) == 1:
            return self.manifest.text_bytes
        return dict(self.manifest.splits)[split].text_bytes  # type: ignore[index]

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that produced the tokens."""
        return dataset_tokenizer(self.path)

    def tokens(self, split: str) -> int:
        """Return the number of tokens of `split`."""
        return self._split(split).tokens

    def documents(self, split: str) -> int:
        """Return the number of documents of `split`."""
        self._split(split)
        return dict(self.manifest.splits)[split].documents  # type: ignore[index]

    def read(self, split: str, start: int, stop: int) -> np.ndarray:
        """Return tokens `start` to `stop` of `split`, a copy, uint16 or uint32 [stop - start].

        Raises:
            DataError: the split has fewer tokens.
            CorruptionError: a chunk among them fails its checksum.
        """
        source = self._split(split)
        if not 0 <= start <= stop <= source.tokens:
            raise DataError(
                f"expected tokens from 0 to {source.tokens} of split {split!r} of {self.path}, got "
                f"{start} to {stop}"
            )
        return source.read(start, stop)

    def document_ends(self, split: str) -> np.ndarray:
        """Return the position just after each document of `split`, int64 [documents]."""
        return self._split(split).document_ends()

    def records(self, split: str) -> RecordIndex:
        """Return the positions of the records of `split`; each record is a document.

        Raises:
            DataError: the data set contains plain text, or has no such split.
        """
        if self.content != "records":
            raise DataError(f"data set {self.path} holds plain text, not prompts and completions")
        self._split(split)
        return self._indexes[split]

    def verify(self, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Verify every byte; return the number of bytes in the files that the manifest names.

        Args:
            on_progress: called repeatedly with (bytes verified, total bytes).

        Raises:
            CorruptionError: a file is missing, has a wrong size or fails a checksum.
        """
        read_built_from(self.path)
        records = self.manifest.files()
        total = sum(record.size_bytes for record in records)
        done = 0
        for record in records:
            read_checked(self.path, record, self.manifest.chunk_bytes)
            done += record.size_bytes
            if on_progress:
                on_progress(done, total)
        return total

    def _split(self, name: str) -> "_Split":
        if name not in self._splits:
            raise DataError(
                f"data set {self.path} has no split {name!r}{did_you_mean(name, self._splits)}; "
                f"it has {', '.join(self._splits)}"
            )
        return self._splits[name]


class _Split:
    """The shards of one split as one sequence of tokens."""

    def __init__(self, folder: Path, shards: list[ShardRecord], manifest: Manifest) -> None:
        self._folder = folder
        self._shards = shards
        self._content: Content = manifest.content
        self._chunk_bytes = manifest.chunk_bytes
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._vocab_size = manifest.vocab_size
        # [shards + 1]: where each shard begins, and the end.
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64)
        self._files = [
            CheckedFile(
                folder, shard.data, self._chunk_bytes, partial(self._check_tokens, shard.data.file)
            )
            for shard in shards
        ]

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        result = np.empty(stop - start, dtype=self._dtype.newbyteorder("="))
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = start
        while done < stop:
            base, end = int(self._starts[number]), int(self._starts[number + 1])
            until = min(stop, end)
            part = self._part(number, done - base, until - base)
            result[done - start : until - start] = part
            release_pages(part)
            done = until
            number += 1
        return result

    def _part(self, number: int, start: int, stop: int) -> np.ndarray:
        size = self._dtype.itemsize
        return self._files[number].read(start * size, stop * size).view(self._dtype)

    def _check_tokens(self, name: str, content: np.ndarray, start: int) -> None:
        """An id beyond the vocabulary would cause an error in an engine, far from the file that
        contains it."""
        tokens = content.view(self._dtype)
        greatest = int(tokens.max())
        if greatest >= self._vocab_size:
            raise CorruptionError(
                f"{self._folder / name} holds token {greatest} between byte {start} and "
                f"{start + tokens.nbytes}, the vocabulary ends at {self._vocab_size - 1}; "
                f"{advice_for(self._folder)}"
            )

    def document_ends(self) -> np.ndarray:
        words = INDEX_ENTRY_BYTES[self._content] // 8  # the end position comes first
        parts = [
            read_checked(self._folder, shard.index, self._chunk_bytes).view("<u8")[::words]
            for shard in self._shards
        ]
        ends = np.concatenate([np.empty(0, "<u8"), *parts])
        if (ends[1:] <= ends[:-1]).any() or (
            ends.size and not 0 < ends[0] <= ends[-1] <= self.tokens
        ):
            raise CorruptionError(
                f"{self._folder}: expected ends of documents that rise from 1 to {self.tokens}, "
                f"the number of tokens; {advice_for(self._folder)}"
            )
        return ends.astype(np.int64)


def check_vocabulary(dataset: TokenDataset, model_vocab_size: int) -> None:
    """Raise DataError if the data set may contain token ids without an embedding in the model."""
    size = dataset.vocab_size
    if size > model_vocab_size:
        raise DataError(
            f"data set {dataset.path} has token ids up to {size - 1} (vocabulary {size}), model "
            f"has vocab_size {model_vocab_size}; set the model's vocab_size to {size} or more, "
            "or build the data set again with the model's tokenizer"
        )
