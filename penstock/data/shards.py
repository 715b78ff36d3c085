"""Writing shards: tokens and document ends are written to disk in checksummed chunks.

Checksums are computed in memory before the write, so that a later read detects an error of the
disk. At most one chunk of data is in memory.
"""

from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from penstock.data.manifest import (
    INDEX_ENTRY_BYTES,
    Content,
    DataFileRecord,
    ShardRecord,
    SplitRecord,
    TokenType,
)
from penstock.io import durable

# Checksums are verified per chunk at first use. A random window should cause little more reading
# than its own size, and one checksum per MiB keeps dataset.json at 40 MB per TB.
CHUNK_BYTES = 2**20
SHARD_BYTES = 2**28


class DataSetFile:
    """A file that is written once, sequentially, with a checksum for every `chunk_bytes`."""

    def __init__(self, path: Path, chunk_bytes: int) -> None:
        self.path = path
        self.size_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._pending = bytearray()
        self._chunks: list[str] = []
        self._file = path.open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self.size_bytes += len(data)
        self._pending += data
        while len(self._pending) >= self._chunk_bytes:
            self._put(self._chunk_bytes)

    def _put(self, count: int) -> None:
        chunk = bytes(self._pending[:count])
        del self._pending[:count]
        self._chunks.append(xxhash.xxh3_128_hexdigest(chunk))
        view = memoryview(chunk)
        while view:
            view = view[self._file.write(view) :]

    def finish(self) -> DataFileRecord:
        """Write pending data, sync the file and close it."""
        if self._pending:
            self._put(len(self._pending))
        durable.sync(self._file.fileno())
        self._file.close()
        return DataFileRecord(file=self.path.name, size_bytes=self.size_bytes, chunks=self._chunks)

    def abandon(self) -> None:
        """Close the file as it is; does nothing to a finished file."""
        self._file.close()


class SplitWriter:
    """Writes one split: `append` tokens, `end_document` after each document, `finish` at the end.

    Args:
        folder: the folder of the files; it must exist.
        split: "train" or "validation", the stem of the file names.
        dtype: "uint16" or "uint32".
        shard_bytes: size of a shard; a multiple of the token size. Documents may cross the
            boundary.
        chunk_bytes: bytes per checksum; a multiple of 8.
        content: "text", or "records", whose prompt lengths are passed to `end_document`.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: TokenType,
        shard_bytes: int,
        chunk_bytes: int,
        content: Content = "text",
    ) -> None:
        self.tokens = 0
        self.documents = 0
        self._stem = folder / split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._shard_tokens = shard_bytes // self._dtype.itemsize
        self._chunk_bytes = chunk_bytes
        self._entry_bytes = INDEX_ENTRY_BYTES[content]
        self._shards: list[ShardRecord] = []
        self._data: DataSetFile | None = None
        self._index: DataSetFile | None = None

    def append(self, ids: np.ndarray) -> None:
        """Append token ids, int [n]; the caller has checked them against the vocabulary."""
        while ids.size:
            if self._data is None or self._room() == 0:
                self._next_shard()
            assert self._data is not None
            part = ids[: self._room()]
            self._data.write(part.astype(self._dtype).tobytes())
            self.tokens += part.size
            ids = ids[part.size :]

    def end_document(self, prompt_tokens: int | None = None) -> None:
        """Mark the end of a document after the last appended token.

        Args:
            prompt_tokens: for a record, the number of its tokens that are the prompt.
        """
        assert self._index is not None, "a document has at least its end-of-document token"
        words = (self.tokens,) if prompt_tokens is None else (self.tokens, prompt_tokens)
        entry = np.array(words, dtype="<u8").tobytes()
        assert len(entry) == self._entry_bytes, "only records have prompts"
        self._index.write(entry)
        self.documents += 1

    def _room(self) -> int:
        assert self._data is not None
        return self._shard_tokens - self._data.size_bytes // self._dtype.itemsize

    def _next_shard(self) -> None:
        self._finish_shard()
        stem = f"{self._stem}-{len(self._shards):05d}"
        self._data = DataSetFile(Path(f"{stem}.bin"), self._chunk_bytes)
        self._index = DataSetFile(Path(f"{stem}.idx"), self._chunk_bytes)

    def _finish_shard(self) -> None:
        if self._data is None or self._index is None:
            return
        data, index = self._data.finish(), self._index.finish()
        self._shards.append(
            ShardRecord(
                tokens=data.size_bytes // self._dtype.itemsize,
                documents=index.size_bytes // self._entry_bytes,
                data=data,
                index=index,
            )
        )
        self._data = self._index = None

    def finish(self) -> SplitRecord:
        """Write and sync the remaining data; return the record for the manifest."""
        self._finish_shard()
        return SplitRecord(tokens=self.tokens, documents=self.documents, shards=self._shards)

    def abandon(self) -> None:
        """Close the files as they are, after a failed build."""
        for file in (self._data, self._index):
            if file is not None:
                file.abandon()


def cut_tail(
    folder: Path, train: SplitRecord, keep_tokens: int, writer: SplitWriter, chunk_bytes: int
) -> SplitRecord:
    """Move all tokens of `train` past the first `keep_tokens` to `writer`; return what is left.

    A document across the cut becomes two documents. The files are changed in place, so only the
    tail is copied, whatever the size of the split.
    """
    kept: list[ShardRecord] = []
    start = 0
    for shard in train.shards:
        here = max(0, min(shard.tokens, keep_tokens - start))
        if here == shard.tokens and start + here < keep_tokens:
            kept.append(shard)
        else:
            _move_rest(folder, shard, start, here, writer)
            if here:
                kept.append(_shorten(folder, shard, start, here, chunk_bytes))
        start += shard.tokens
    return SplitRecord(
        tokens=keep_tokens, documents=sum(shard.documents for shard in kept), shards=kept
    )


def read_tokens(folder: Path, split: SplitRecord, start: int, stop: int) -> np.ndarray:
    """Return tokens `start` to `stop` of a split that this process has just written, unverified."""
    parts = []
    base = 0
    for shard in split.shards:
        begin, end = max(start - base, 0), min(stop - base, shard.tokens)
        if begin < end:
            token = np.dtype(f"<u{shard.data.size_bytes // shard.tokens}")
            path = folder / shard.data.file
            parts.append(np.fromfile(path, token, end - begin, offset=begin * token.itemsize))
        base += shard.tokens
    return np.concatenate(parts)


def _move_rest(
    folder: Path, shard: ShardRecord, start: int, here: int, writer: SplitWriter
) -> None:
    token = np.dtype(f"<u{shard.data.size_bytes // shard.tokens}")
    ends = np.fromfile(folder / shard.index.file, dtype="<u8").astype(np.int64) - start
    done = here
    with (folder / shard.data.file).open("rb") as file:
        file.seek(here * token.itemsize)
        for end in ends[ends > here].tolist():
            _copy(file, token, end - done, writer)
            writer.end_document()
            done = end
        _copy(file, token, shard.tokens - done, writer)
    if not here:
        (folder / shard.data.file).unlink()
        (folder / shard.index.file).unlink()


def _copy(file: BinaryIO, token: np.dtype, count: int, writer: SplitWriter) -> None:
    while count:
        part = np.frombuffer(file.read(min(count, 2**20) * token.itemsize), dtype=token)
        writer.append(part)
        count -= part.size


def _shorten(
    folder: Path, shard: ShardRecord, start: int, here: int, chunk_bytes: int
) -> ShardRecord:
    token_bytes = shard.data.size_bytes // shard.tokens
    path = folder / shard.data.file
    size_bytes = here * token_bytes
    whole = size_bytes // chunk_bytes
    with path.open("r+b") as file:
        file.truncate(size_bytes)
        file.seek(whole * chunk_bytes)
        rest = file.read()
        durable.sync(file.fileno())
    chunks = shard.data.chunks[:whole] + ([xxhash.xxh3_128_hexdigest(rest)] if rest else [])
    ends = np.fromfile(folder / shard.index.file, dtype="<u8")
    ends = np.append(ends[ends < start + here], np.uint64(start + here)).astype("<u8")
    (folder / shard.index.file).unlink()
    index = DataSetFile(folder / shard.index.file, chunk_bytes)
    try:
        index.write(ends.tobytes())
        index_record = index.finish()
    finally:
        index.abandon()
    return ShardRecord(
        tokens=here,
        documents=ends.size,
        data=DataFileRecord(file=shard.data.file, size_bytes=size_bytes, chunks=chunks),
        index=index_record,
    )
