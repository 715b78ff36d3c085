"""Builds a data set from text: read, tokenise, pack and split (`packing.py`), and publish
atomically."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.data.built_from import BuiltFrom
from penstock.data.manifest import CONTENTS, MANIFEST_NAME, Content, Manifest
from penstock.data.packing import Packer, RecordPacker, TextPacker, hash_share
from penstock.data.publish import published_folder
from penstock.data.shards import CHUNK_BYTES, SHARD_BYTES
from penstock.data.sources import BLOCK_BYTES, Pair, TextPiece, find_files, read_pairs, read_pieces
from penstock.data.tokenizers import Tokenizer, load_tokenizer, train_bpe, train_size
from penstock.errors import ConfigError, DataError, did_you_mean, numbered

# A tokenizer is trained on at most about this much text, sampled evenly from the whole. On 30 MB of
# source code, 4096 tokens trained on half of it produce 0.5% more tokens than those trained on all
# of it. Training takes seconds whatever the size of the corpus.
TRAINING_BYTES = 2**24

CHECKED_FILES, CHECKED_BYTES = 100, 2**26
"""After a broken file, the files, and about the bytes of them, that are read to find others."""
_MOST_ERRORS = 5  # in one message

Progress = Callable[[str, int, int], None]
_Part = TypeVar("_Part", TextPiece, Pair)


@dataclass(frozen=True)
class BuildReport:
    """The result of a build.

    Attributes:
        path: the folder of the data set.
        manifest: its manifest.
        files: number of files read.
        notes: messages for the user, one sentence each.
    """

    path: Path
    manifest: Manifest
    files: int
    notes: tuple[str, ...]


@dataclass
class _Corpus:
    """The input, which can be read several times."""

    files: list[Path]
    on_progress: Progress
    total_bytes: int

    @classmethod
    def of(cls, files: list[Path], on_progress: Progress | None) -> _Corpus:
        total_bytes = sum(_size_bytes(path) for path in files)
        return cls(files, on_progress or (lambda *_: None), total_bytes)

    @property
    def where(self) -> str:
        """The input, described for users."""
        return f"the {len(self.files)} input files" if len(self.files) > 1 else f"{self.files[0]}"

    def parts(self, read: Callable[[Path], Iterator[_Part]], phase: str) -> Iterator[_Part]:
        """Yield the results of `read` for each file, in order, and report progress."""
        done = 0
        for number, path in enumerate(self.files, start=1):
            try:
                for part in read(path):
                    yield part
                    done += part.input_bytes
                    self.on_progress(phase, min(done, self.total_bytes), self.total_bytes)
            except DataError as error:
                if (all_found := _with_later(error, path, self.files[number:], read)) is error:
                    raise
                raise all_found from error.__cause__
        self.on_progress(phase, self.total_bytes, self.total_bytes)


def build_dataset(
    inputs: Sequence[str | os.PathLike[str]],
    tokenizer: str,
    out: str | os.PathLike[str],
    *,
    validation: float = 0.05,
    seed: int = 0,
    content: Content = "text",
    field: str = "text",
    prompt_field: str = "prompt",
    completion_field: str = "completion",
    glob: str | None = None,
    exclude: Sequence[str] = (),
    chosen_from: Sequence[str | os.PathLike[str]] | None = None,
    overwrite: bool = False,
    check: Callable[[Path], object] = lambda folder: None,
    on_progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> BuildReport:
    """Make a data set of `inputs` in the folder `out`; return a report.

    Args:
        inputs: text, .jsonl and .parquet files, and folders of them; each file is read once.
        tokenizer: `bytes`, `train-bpe:SIZE`, or the path of a tokenizer.
        out: the folder to create; it appears complete or not at all.
        validation: share of the documents that are held out, 0 (none) to less than 1.
        seed: determines which documents are held out.
        content: "text", or "records" (prompt and completion) from .jsonl and .parquet files alone.
        field: field or column with the text, in .jsonl and .parquet files.
        prompt_field, completion_field: fields or columns of records.
        glob: pattern for the names of files inside folders.
        exclude: patterns for files and folders inside folders that are left out.
        chosen_from: the set from which `inputs` were chosen, if they were; a run may refer to it by
            name.
        overwrite: replace an existing data set, in one atomic operation.
        check: called with the complete folder before `out` appears; an error ends the build.
        on_progress: called with (phase, input bytes done, input bytes in all).
        shard_bytes: size of a shard file, a multiple of 4.
        chunk_bytes: bytes per checksum, a multiple of 8.

    Raises:
        ConfigError: `validation`, `seed`, `content` or `tokenizer` is invalid.
        DataError: an input is missing, empty or broken, or `out` already exists.
        StorageError: the operating system refused a write.
    """
    _check_arguments(validation, seed, content)
    size = train_size(tokenizer)
    encoder = load_tokenizer(tokenizer) if size is None else None
    corpus = _Corpus.of(find_files(inputs, glob, exclude), on_progress)
    _refuse_output_inside(inputs, out := Path(out))
    read = _reader(*(fields := (content, field, prompt_field, completion_field)))
    make_packer: type[Packer[Any]] = TextPacker if content == "text" else RecordPacker
    reads_all = glob is None and not exclude and chosen_from is None
    with published_folder(out, _is_dataset if overwrite else None) as folder:
        if encoder is None:
            assert size is not None
            encoder = _train(corpus, read, size, seed)
        packer = make_packer(folder, encoder, seed, validation, shard_bytes, chunk_bytes)
        try:
            packer.add(corpus.parts(read, "tokenising"))
            manifest = packer.finish(corpus.where)
            named = inputs if chosen_from is None else chosen_from
            of = (named, corpus.files, *fields, validation, seed)
            BuiltFrom.of(*of, reads_all=reads_all).write(folder)
        finally:
            packer.abandon()
        check(folder)
    notes = (*packer.notes, *_notes_on(encoder, size))
    return BuildReport(out, manifest, len(corpus.files), notes)


def _with_later(
    first: DataError,
    first_path: Path,
    later: Sequence[Path],
    read: Callable[[Path], Iterator[TextPiece | Pair]],
) -> DataError:
    """Return the error of a file together with those of later files, of which a bounded part is
    read. Ctrl-C ends the search, not the report."""
    lines, broken, checked, left = [str(first)], 1, 0, CHECKED_BYTES
    paths = {str(first).replace(str(first_path), ""): first_path}  # by the text without the path
    try:
        for path in later[:CHECKED_FILES]:
            try:
                for part in read(path):
                    left -= part.input_bytes
                    if left <= 0:
                        break
            except DataError as error:
                left -= BLOCK_BYTES  # of which no part was yielded
                broken += 1
                if len(lines) < _MOST_ERRORS:
                    same = paths.setdefault(str(error).replace(str(path), ""), path)
                    lines.append(str(error) if same is path else f"{path}: as {same}")
                checked += 1
            else:
                checked += left > 0
            if left <= 0:
                break
    except KeyboardInterrupt:
        pass  # the files that were not checked are counted below
    if broken == 1:
        return first
    if broken > len(lines):
        lines.append(f"and {broken - len(lines)} more")
    if checked < len(later):
        lines.append(f"not checked: {numbered(len(later) - checked, 'further file')}")
    return DataError("\n  ".join([f"{broken} input files cannot be used:", *lines]))


def _reader(
    content: Content, field: str, prompt_field: str, completion_field: str
) -> Callable[[Path], Iterator[Any]]:
    """Return the function that reads the parts of one input file."""
    if content == "text":
        return lambda path: read_pieces(path, field)
    return lambda path: read_pairs(path, prompt_field, completion_field)


def _train(
    corpus: _Corpus, read: Callable[[Path], Iterator[Any]], size: int, seed: int
) -> Tokenizer:
    """Return a tokenizer trained on a sample of the input."""
    parts = corpus.parts(read, "training the tokenizer")
    return train_bpe(_training_texts(parts, corpus.total_bytes, seed), size)


def _notes_on(encoder: Tokenizer, size: int | None) -> Iterator[str]:
    """Yield a note if a tokenizer has fewer tokens than the requested `size`."""
    if size is not None and encoder.vocab_size < size:
        yield (
            f"the text gives a tokenizer of {encoder.vocab_size} tokens, fewer than the requested "
            f"{size}"
        )


def _check_arguments(validation: float, seed: int, content: str) -> None:
    if content not in CONTENTS:
        raise ConfigError(
            f"content: expected {' or '.join(CONTENTS)}, got {content!r}"
            f"{did_you_mean(content, CONTENTS)}"
        )
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


def _training_texts(
    parts: Iterator[TextPiece | Pair], total_bytes: int, seed: int
) -> Iterator[str]:
    share = TRAINING_BYTES / max(1, total_bytes)
    for number, part in enumerate(parts):
        if hash_share(seed, number) < share:
            yield from (
                [part.text] if isinstance(part, TextPiece) else [part.prompt, part.completion]
            )
