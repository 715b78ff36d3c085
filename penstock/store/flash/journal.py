"""The journal of a flash store: which steps are durable, the places of their extents, and
checksums.

The journal is append-only. A record is `[header | payload]`, padded to whole sectors, followed by a
*seal* of one sector. The record is synced before the seal is written, and the seal is synced before
any part relies on the record:

- no seal, and no seal behind the record: the process died during the append; the record never
  counted and is overwritten;
- a seal that does not match its record, a header or seal that is neither intact nor blank, or a
  blank header or seal that has a seal behind its record: the bytes have changed since they were
  written. This is an error that names the place.

The distinction relies on sectors of 512 bytes being written completely or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from penstock.errors import CorruptionError, StorageError
from penstock.io import NotPlainError, durable, failpoints, open_own, open_plain
from penstock.store.flash import medium

SECTOR_BYTES = 512
MAX_RECORD_BYTES = 1 << 30  # the checksums of 64 TB of extents take 128 MiB
ROTATE_BYTES = 16 << 20
_MAGIC, _SEAL = b"PSTKREC\1", b"PSTKSEAL"
_HEADER = struct.Struct("<8sQQ16s")  # magic, number, payload bytes, checksum of the payload
_SEALED = struct.Struct("<8sQ16s")  # magic, number, checksum of the whole record
_LOOKED_THROUGH_BYTES = 1 << 20  # at a time
REPAIR = "`penstock inspect RUN --repair` rolls back to the newest intact durable step"
_CHECK_BYTES = 16  # the last bytes of a sector are the checksum of the bytes before them


@dataclass(frozen=True)
class Record:
    """One record: a mapping, and binary data beside it (checksums, which would be large as
    text)."""

    content: Mapping[str, Any]
    blob: bytes = b""


@dataclass(frozen=True)
class _Header:
    number: int
    payload_bytes: int
    checksum: bytes

    @property
    def record_bytes(self) -> int:
        """Bytes from this header to the next; payload and seal are whole sectors."""
        return SECTOR_BYTES + _padded(self.payload_bytes) + SECTOR_BYTES


class Journal:
    """An open journal; one process appends to it.

    `records` are the first record, which describes the store, and the last ones.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records, self._end = read_records(path)
        self._count = len(self.records)
        try:
            self._descriptor = open_own(path, os.O_RDWR)
            os.ftruncate(self._descriptor, self._end)  # an unfinished record
        except OSError as error:
            raise _unusable(path, error) from error

    @classmethod
    def create(cls, path: Path, first: Record) -> Journal:
        """Create a journal whose first record describes the store; durable on return."""
        durable.replace_file(path, _spelled(0, first), "journal.create")
        return cls(path)

    def settle(self) -> None:
        """Sync the records that were read: a killed process may have left its last seal, or the
        file's name, unsynced.

        Raises:
            StorageError: the system refused.
        """
        try:
            durable.sync(self._descriptor)
            durable.sync_folder(self.path.parent)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def append(self, record: Record, keep: int) -> None:
        """Append a record; on return the record is durable. Earlier records stay: the first and
        `keep`.

        Raises:
            OSError: the system refused; the record does not count.
            StorageError: the journal was deleted or moved, so that no reader would find the record.
        """
        self._require_place()
        body, seal = _record(self._count, record)
        failpoints.point("journal.before_record")
        _write(self._descriptor, body, self._end)
        failpoints.point("journal.before_record_sync")
        durable.sync(self._descriptor)
        failpoints.point("journal.before_seal")
        _write(self._descriptor, seal, self._end + len(body))
        failpoints.point("journal.before_seal_sync")
        durable.sync(self._descriptor)
        failpoints.point("journal.after_seal_sync")
        self._end += len(body) + len(seal)
        self._count += 1
        self.records = [self.records[0], *[*self.records[1:], record][-keep:]]
        if self._end > ROTATE_BYTES and self._count > keep + 2:
            self._rewrite(self.records, "journal.rotate")

    def keep_only(self, records: Sequence[Record]) -> None:
        """Durably remove all records but the first and the given ones; the last of these becomes
        current."""
        self._rewrite([self.records[0], *records], "journal.drop")

    def _rewrite(self, kept: list[Record], point: str) -> None:
        self._end = rewrite_journal(self.path, kept, point)
        self.close()
        self._descriptor = open_own(self.path, os.O_RDWR)
        self.records, self._count = kept, len(kept)

    def _require_place(self) -> None:
        """Check that the open file is still the file at its path."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._descriptor)):
                return
        raise StorageError(
            f"{self.path}: was deleted, moved or replaced while the run had it open, so new steps "
            "cannot be stored; put it back and give the same command again"
        )

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def rewrite_journal(path: Path, records: Sequence[Record], point: str) -> int:
    """Replace the journal at `path` by one with these records alone; return its length.

    The new journal is durable on return; until then the old one stays. `point` is the prefix of the
    failpoints on the way.
    """
    content = b"".join(_spelled(number, record) for number, record in enumerate(records))
    durable.replace_file(path, content, point)
    return len(content)


def read_records(path: Path) -> tuple[list[Record], int]:
    """Return the records of a journal that count, and the offset of the next record.

    Raises:
        CorruptionError: bytes have changed; the message gives the place and both checksums.
        StorageError: the file cannot be read.
    """
    records: list[Record] = []
    place = 0
    try:
        with open_plain(path) as file:
            while (found := _read(path, file, place, len(records))) is not None:
                record, place = found
                records.append(record)
    except OSError as error:
        raise _unusable(path, error) from error
    if not records:
        raise _nothing_whole(path)
    return records, place


def whole_records(path: Path) -> list[Record]:
    """Return the records of a journal whose bytes are unchanged, although other records have
    changed.

    A record behind damage is used only if its header, body and seal are intact and its number is
    greater than the numbers before it: the record was then appended to this journal, and was
    durable.

    Raises:
        CorruptionError: the first record, which describes the store, is not intact.
        StorageError: the file cannot be read.
    """
    records: list[Record] = []
    try:
        with open_plain(path) as file:
            found = _read(path, file, 0, 0)
            if found is None:
                raise _nothing_whole(path)
            records, place, number = [found[0]], found[1], 1
            while len(sector := _bytes_at(file, place, SECTOR_BYTES)) == SECTOR_BYTES:
                header = _header_of(sector)
                if header is None or header.number < number:
                    place += SECTOR_BYTES
                    continue
                with contextlib.suppress(CorruptionError):
                    records.append(_sealed(path, file, place, header))
                # The header is intact, so the offset of the next record is known whatever else has
                # changed.
                place, number = place + header.record_bytes, header.number + 1
    except OSError as error:
        raise _unusable(path, error) from error
    return records


def _nothing_whole(path: Path) -> CorruptionError:
    return CorruptionError(
        f"{path}: holds no complete record; it is not a journal, or it was truncated"
    )


def _unusable(path: Path, error: OSError) -> CorruptionError | StorageError:
    if isinstance(error, NotPlainError):
        return CorruptionError(f"{path}: {error.strerror}")
    return StorageError(f"{path}: cannot use it: {error.strerror}")


def _read(path: Path, file: BinaryIO, place: int, number: int) -> tuple[Record, int] | None:
    """Return the record at `place` and the offset of the next; None if no record was finished
    there."""
    sector = _bytes_at(file, place, SECTOR_BYTES)
    if len(sector) < SECTOR_BYTES or not any(sector):
        _require_end(path, file, place, f"the header of record {number}")
        return None
    _require_sector(path, sector, place, f"the header of record {number}")
    header = _header_of(sector)
    if header is None or header.number != number:
        _, found, length, _ = _HEADER.unpack_from(sector)
        raise CorruptionError(
            f"{path}: at byte {place:,}: expected record {number}, got record {found} of "
            f"{length:,} bytes; the journal was assembled from parts of other journals"
        )
    end = place + header.record_bytes - SECTOR_BYTES
    seal = _bytes_at(file, end, SECTOR_BYTES)
    if len(seal) < SECTOR_BYTES or not any(seal):
        _require_end(path, file, end, f"the seal of record {number}")
        return None
    _require_sector(path, seal, end, f"the seal of record {number}")
    return _sealed(path, file, place, header), end + SECTOR_BYTES


def _sealed(path: Path, file: BinaryIO, place: int, header: _Header) -> Record:
    """Return the record at `place`, which begins with `header`.

    Raises:
        CorruptionError: the seal does not match the record's bytes.
    """
    end = place + header.record_bytes - SECTOR_BYTES
    seal = _bytes_at(file, end, SECTOR_BYTES)
    sealed = _SEALED.unpack_from(seal)[-1] if len(seal) == SECTOR_BYTES else b""
    if not sealed or not _is_whole(seal):
        raise CorruptionError(f"{path}: record {header.number} has no complete seal")
    body = _bytes_at(file, place, end - place)
    actual = xxhash.xxh3_128_digest(body)
    payload = body[SECTOR_BYTES : SECTOR_BYTES + header.payload_bytes]
    if actual != sealed or xxhash.xxh3_128_digest(payload) != header.checksum:
        raise CorruptionError(
            f"{path}: record {header.number}, bytes {place:,} to {end:,}: expected checksum "
            f"{sealed.hex()}, got {actual.hex()}; the file has changed since it was written; "
            f"{REPAIR}"
        )
    try:
        size = int.from_bytes(payload[:8], "little")
        content = json.loads(bytes(payload[8 : 8 + size]))
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{path}: record {header.number} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CorruptionError(f"{path}: record {header.number} is not a mapping")
    return Record(content, bytes(payload[8 + size :]))


def _header_of(sector: memoryview) -> _Header | None:
    """Return the header in a sector; None if the sector is no intact header."""
    magic, number, length, checksum = _HEADER.unpack_from(sector)
    if magic != _MAGIC or length > MAX_RECORD_BYTES or not _is_whole(sector):
        return None
    return _Header(number, length, checksum)


def _bytes_at(file: BinaryIO, place: int, count: int) -> memoryview:
    """Read `count` bytes, or all bytes up to the end of the file."""
    pieces = []
    while count and (piece := os.pread(file.fileno(), count, place)):
        pieces.append(piece)
        place, count = place + len(piece), count - len(piece)
    return memoryview(b"".join(pieces))


def _require_sector(path: Path, sector: memoryview, place: int, what: str) -> None:
    expected = bytes(sector[-_CHECK_BYTES:])
    found = xxhash.xxh3_128_digest(sector[:-_CHECK_BYTES])
    if found != expected:
        raise CorruptionError(
            f"{path}: {what}, at byte {place:,}: expected checksum {expected.hex()}, got "
            f"{found.hex()}; the file has changed since it was written; {REPAIR}"
        )


def _require_end(path: Path, file: BinaryIO, place: int, what: str) -> None:
    """Check that no seal follows a blank sector.

    Any sector of an unfinished record may be present or missing, but never its seal.
    """
    behind = place + SECTOR_BYTES
    while sectors := _bytes_at(file, behind, _LOOKED_THROUGH_BYTES):
        for begin in range(0, len(sectors) - SECTOR_BYTES + 1, SECTOR_BYTES):
            sector = sectors[begin : begin + SECTOR_BYTES]
            if sector[: len(_SEAL)] == _SEAL and _is_whole(sector):
                raise CorruptionError(
                    f"{path}: {what}, at byte {place:,}: expected a checksum, got zeros, although "
                    f"a sealed record follows at byte {behind + begin:,}; the file has changed "
                    f"since it was written; {REPAIR}"
                )
        behind += len(sectors)


def _is_whole(sector: memoryview) -> bool:
    return xxhash.xxh3_128_digest(sector[:-_CHECK_BYTES]) == bytes(sector[-_CHECK_BYTES:])


def _record(number: int, record: Record) -> tuple[bytes, bytes]:
    """Return a record's bytes and its seal."""
    text = json.dumps(record.content, separators=(",", ":")).encode()
    payload = len(text).to_bytes(8, "little") + text + record.blob
    header = _HEADER.pack(_MAGIC, number, len(payload), xxhash.xxh3_128_digest(payload))
    body = _sector(header) + payload.ljust(_padded(len(payload)), b"\0")
    return body, _sector(_SEALED.pack(_SEAL, number, xxhash.xxh3_128_digest(body)))


def _spelled(number: int, record: Record) -> bytes:
    return b"".join(_record(number, record))


def _sector(content: bytes) -> bytes:
    padded = content.ljust(SECTOR_BYTES - _CHECK_BYTES, b"\0")
    return padded + xxhash.xxh3_128_digest(padded)


def _padded(size: int) -> int:
    return -(-size // SECTOR_BYTES) * SECTOR_BYTES


def _write(descriptor: int, data: bytes, offset: int) -> None:
    rest = np.frombuffer(data, np.uint8)
    while rest.size:
        count = medium.write_at(descriptor, rest, offset)
        rest, offset = rest[count:], offset + count
