"""Sources of text: text files, JSON Lines, Parquet, and folders of them.

Plain documents are yielded as pieces of bounded length, in a fixed order, so neither a corpus nor a
single document must fit in memory. Prompts with their completions are yielded one by one. Every
error names the file and the record.
"""

import codecs
import contextlib
import fnmatch
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from glob import glob as expand_pattern, has_magic
from pathlib import Path
from typing import Any

from penstock.errors import DataError, did_you_mean, few, install_extra

PIECE_CHARACTERS = 2**18
BLOCK_BYTES = 2**18

# Places where a text may be cut without changing GPT-2's word splitting on either side: after a
# line break, or before a space, with other characters than white space on both sides.
_LINE_CUT = re.compile(r"(?<=\S)\n(?=\S)")
_SPACE_CUT = re.compile(r"(?<=\S) (?=\S)")

_Row = tuple[str, tuple[str, ...], int]  # place in the input, the fields' texts, bytes of input


@dataclass(frozen=True)
class TextPiece:
    """Part of a document.

    Attributes:
        record: place in the input, for users: `file`, `file:line` or `file, row n`.
        text: valid Unicode, at most about PIECE_CHARACTERS long.
        ends_document: whether it is the last piece of its document.
        input_bytes: approximate bytes of input, for progress.
    """

    record: str
    text: str
    ends_document: bool
    input_bytes: int


@dataclass(frozen=True)
class Pair:
    """A prompt and its completion.

    Attributes:
        record: place in the input, for users: `file:line` or `file, row n`.
        prompt: valid Unicode, may be empty.
        completion: valid Unicode, not empty.
        input_bytes: approximate bytes of input, for progress.
    """

    record: str
    prompt: str
    completion: str
    input_bytes: int


@dataclass(frozen=True)
class Field:
    """A field of JSON objects or a column: its name, and the option that sets the name."""

    name: str
    option: str = "--field or data.text_field"


def find_files(
    inputs: Iterable[str | os.PathLike[str]], glob: str | None = None, exclude: Sequence[str] = ()
) -> list[Path]:
    """Return the files to read: the inputs in their order, folders walked in sorted order.

    Each file is returned once, at its first place, also if several inputs or links lead to it: the
    documents of a file that is read twice could be both trained on and held out.

    Args:
        inputs: files, folders and patterns such as `texts/*.txt` (`**` for any depth). In folders,
            names that begin with a dot are skipped.
        glob: pattern that a file's name inside a folder must match, such as `*.py`.
        exclude: patterns; a file or folder inside a folder is excluded if its name or its path from
            that folder matches one.

    Raises:
        DataError: an input does not exist, is neither file nor folder, or there is no file at all.
    """
    named = _expand_all(inputs)
    _require_existing(named)
    found: dict[str, Path] = {}
    for real, file in _named_files(named, glob, exclude):
        found.setdefault(real, file)
    if not found:
        pattern = f" that match {glob!r}" if glob else ""
        where = ", ".join(str(path) for path in named) or "an empty list of inputs"
        raise DataError(f"found no files{pattern} in {where}")
    return list(found.values())


def repeated_files(inputs: Iterable[str | os.PathLike[str]]) -> int:
    """Return the number of files to which the inputs lead more than once.

    Raises:
        DataError: as `find_files`.
    """
    counts = Counter(real for real, _ in _named_files(_expand_all(inputs), None, ()))
    return sum(count > 1 for count in counts.values())


def _named_files(
    named: Iterable[Path], glob: str | None, exclude: Sequence[str]
) -> Iterator[tuple[str, Path]]:
    """Yield the real path and the path of every file, again at every place that leads to it."""
    real_folder = cache(os.path.realpath)  # a walk through each folder's parents, not each file's
    for path in named:
        for file in _files_of(path, glob, exclude):
            folder, name = os.path.split(file)
            is_link = os.path.islink(file)
            real = os.path.realpath(file) if is_link else os.path.join(real_folder(folder), name)
            yield real, file


def _expand_all(inputs: Iterable[str | os.PathLike[str]]) -> list[Path]:
    return [path for one in inputs for path in _expand(os.fspath(one))]


def _expand(one: str) -> list[Path]:
    """The paths that match a pattern; an existing path stands for itself, whatever its name."""
    if os.path.lexists(one) or not has_magic(one):
        return [Path(one)]
    return [Path(match) for match in sorted(expand_pattern(one, recursive=True))] or [Path(one)]


def _files_of(path: Path, glob: str | None, exclude: Sequence[str]) -> Iterable[Path]:
    """The file at `path`, or the files inside the folder at `path`."""
    if path.is_dir():
        return _walk(path, glob, exclude)
    if path.is_file():
        return [path]
    if os.path.lexists(path):
        raise DataError(f"input {path} is neither a file nor a folder")
    raise DataError(f"input {path} does not exist{_sibling(path)}")


def _require_existing(named: Iterable[Path]) -> None:
    """Refuse several inputs that do not exist together; `_files_of` refuses a single one."""
    missing = [path for path in named if not os.path.lexists(path)]
    if len(missing) > 1:
        names = [f"{path}{_sibling(path)}" for path in missing]
        raise DataError(f"{len(missing)} inputs do not exist: {few(names)}")


def _sibling(path: Path) -> str:
    """Return a question for a file beside `path` with a similar name, or an empty string."""
    siblings: list[str] = []
    with contextlib.suppress(OSError):
        siblings = [entry.name for entry in path.parent.iterdir()]
    return did_you_mean(path.name, siblings)


def _walk(folder: Path, glob: str | None, exclude: Sequence[str]) -> Iterator[Path]:
    def wanted(path: Path) -> bool:
        relative = path.relative_to(folder).as_posix()
        return not path.name.startswith(".") and not any(
            fnmatch.fnmatchcase(path.name, one) or fnmatch.fnmatchcase(relative, one)
            for one in exclude
        )

    def fail(error: OSError) -> None:
        raise DataError(f"cannot read folder {error.filename}: {error.strerror}")

    for base, folders, files in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if wanted(Path(base, name)))
        for name in sorted(files):
            path = Path(base, name)
            if wanted(path) and (glob is None or fnmatch.fnmatchcase(name, glob)):
                yield path


def read_pieces(path: Path, field: str = "text") -> Iterator[TextPiece]:
    """Yield the documents of a file, piece by piece; empty documents are skipped.

    `.jsonl` contains one JSON object per line with the text in `field`, `.parquet` has a column
    `field`. Any other file is UTF-8 text and one document. A byte order mark is removed.

    Raises:
        DataError: the file cannot be read or is corrupt; the message names the place.
    """
    reader = _READERS.get(path.suffix.lower())
    try:
        if reader is None:
            yield from _text_file(path)
            return
        for record, (text,), input_bytes in reader(path, (Field(field),)):
            yield from _cut(record, text, input_bytes)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def read_pairs(
    path: Path, prompt: str = "prompt", completion: str = "completion"
) -> Iterator[Pair]:
    """Yield the prompts of a `.jsonl` or `.parquet` file with their completions, in order.

    Raises:
        DataError: the file has another type, cannot be read or is corrupt, or a completion is
            empty; the message names the place.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: prompts with completions come from .jsonl and .parquet files, but this file "
            "is read as plain text, and one data set cannot hold both; remove the file or build a "
            "data set of text"
        )
    fields = (
        Field(prompt, "--prompt-field or data.prompt_field"),
        Field(completion, "--completion-field or data.completion_field"),
    )
    try:
        for record, (before, after), input_bytes in reader(path, fields):
            if not after:
                raise DataError(
                    f"{record}: field {completion!r} is empty: there is nothing to learn; add the "
                    "completion or remove the record"
                )
            yield Pair(record, before, after, input_bytes)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _cut_position(text: str) -> int:
    """The last allowed place to cut `text`, after its middle; its length if there is no such
    place."""
    for pattern, offset in ((_LINE_CUT, 1), (_SPACE_CUT, 0)):
        cut = -1
        for match in pattern.finditer(text, len(text) // 2):
            cut = match.start() + offset
        if cut > 0:
            return cut
    return len(text)


def _cut(record: str, text: str, input_bytes: int) -> Iterator[TextPiece]:
    start, share = 0, input_bytes
    while len(text) - start > PIECE_CHARACTERS:
        window = text[start : start + PIECE_CHARACTERS]
        cut = _cut_position(window)
        part = input_bytes * cut // len(text)
        share -= part
        yield TextPiece(record, window[:cut], False, part)
        start += cut
    if start < len(text):
        yield TextPiece(record, text[start:], True, share)


def _text_file(path: Path) -> Iterator[TextPiece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, position = "", 0
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK_BYTES)
            undecoded = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(str(path), position - undecoded + error.start, error) from None
            held += text.removeprefix("\ufeff") if position == 0 else text
            position += len(block)
            # One extra character is kept back, so that the last piece is never empty.
            while len(held) > PIECE_CHARACTERS:
                cut = _cut_position(held[:PIECE_CHARACTERS])
                yield TextPiece(str(path), held[:cut], False, len(held[:cut].encode()))
                held = held[cut:]
            if not block:
                break
    if held:
        yield TextPiece(str(path), held, True, len(held.encode()))


def _not_utf8(where: str, offset: int, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{where}: byte {offset} (0x{error.object[error.start]:02x}) is not UTF-8 text "
        f"({error.reason}); convert the file to UTF-8 or remove it"
    )


def _json_lines(path: Path, fields: Sequence[Field]) -> Iterator[_Row]:
    position = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = f"{path}:{number}"
            start, position = position, position + len(line)
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
                start = position - len(line)
            try:
                decoded = line.decode().strip()
            except UnicodeDecodeError as error:
                raise _not_utf8(record, start + error.start, error) from None
            if decoded:
                yield record, _fields_of(record, decoded, fields), position - start


def _fields_of(record: str, line: str, fields: Sequence[Field]) -> tuple[str, ...]:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{record}: broken JSON at column {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{record}: broken JSON: {error}") from None
    if not isinstance(value, dict):
        names = " and ".join(f"a field {field.name!r}" for field in fields)
        raise DataError(f"{record}: expected a JSON object with {names}, got {_kind(value)}")
    for field in fields:
        if field.name not in value:
            present = ", ".join(map(repr, value)) or "none"
            raise DataError(
                f"{record}: no field {field.name!r}{did_you_mean(field.name, value)}; the fields "
                f"are {present}; {_other_field(field, value)}"
            )
    return tuple(_checked_text(record, field.name, value[field.name]) for field in fields)


def _other_field(field: Field, present: Iterable[str]) -> str:
    """Advice for a missing field."""
    advice = f"choose another with {field.option}"
    if field == Field("text") and {"prompt", "completion"} <= set(present):
        return (
            f"{advice}, or build records of prompt and completion: --content records, or "
            "data.content: records"
        )
    return advice


def _checked_text(record: str, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{record}: field {field!r} must be text, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{record}: field {field!r} has half of a surrogate pair at character {error.start}, "
            "which is not text"
        ) from None
    return value


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _parquet_rows(path: Path, fields: Sequence[Field]) -> Iterator[_Row]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow, which is not installed; "
            f"{install_extra('parquet')}"
        ) from None
    broken = (arrow.ArrowException, OSError)
    try:
        file = parquet.ParquetFile(path)
    except broken as error:
        raise DataError(f"{path} is not a readable Parquet file: {_first_line(error)}") from None
    with file:
        schema = file.schema_arrow
        for field in fields:
            name = field.name
            if name not in schema.names:
                raise DataError(
                    f"{path}: no column {name!r}{did_you_mean(name, schema.names)}; the columns "
                    f"are {', '.join(map(repr, schema.names))}; "
                    f"{_other_field(field, schema.names)}"
                )
            kind = schema.field(name).type
            if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
                raise DataError(f"{path}: column {name!r} must be text, it is {kind}")
        row = 0
        row_bytes = path.stat().st_size // max(1, file.metadata.num_rows)
        batches = file.iter_batches(batch_size=256, columns=[field.name for field in fields])
        while True:
            try:
                batch = next(batches, None)
            except broken as error:
                raise DataError(
                    f"{path}: broken Parquet data after row {row}: {_first_line(error)}"
                ) from None
            if batch is None:
                return
            columns = [batch.column(field.name) for field in fields]
            for values in zip(*columns, strict=True):
                record = f"{path}, row {row}"
                try:
                    texts = [value.as_py() for value in values]
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{record}: byte {error.start} of the text is not UTF-8 ({error.reason})"
                    ) from None
                checked = (
                    _checked_text(record, field.name, text)
                    for field, text in zip(fields, texts, strict=True)
                )
                yield record, tuple(checked), row_bytes
                row += 1


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


_READERS = {".jsonl": _json_lines, ".parquet": _parquet_rows}
