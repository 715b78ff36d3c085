"""`built_from.json`: the inputs of a data set, so that no run trains on it in place of another
text.

It lies beside `dataset.json` and does not affect the identity of a data set: equal text from two
places makes equal data sets. Data sets of older releases have no such file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.data.manifest import Content, checksum_of
from penstock.errors import CorruptionError, DataError
from penstock.io import NotPlainError, durable, read_plain

BUILT_FROM_NAME = "built_from.json"
_MOST_BYTES = 16 << 20
_SAMPLE_BYTES = 1 << 16
_RECORD_FIELDS = ("prompt_field", "completion_field")


class BuiltFrom(BaseModel):
    """The request to `build_dataset`.

    `paths` are the inputs as absolute paths. `sample` is the result of `sample_of` for the files
    that were read: all files of the inputs if `reads_all`, which older releases did not record.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    input: list[str]
    paths: list[str]
    sample: str
    content: Content
    text_field: str = "text"  # older releases do not record it and had no other
    prompt_field: str
    completion_field: str
    validation: float
    seed: int | None = None  # None: not recorded, by an older release
    reads_all: bool = False

    @classmethod
    def of(
        cls,
        inputs: Sequence[str | os.PathLike[str]],
        files: Sequence[Path],
        content: Content,
        text_field: str,
        prompt_field: str,
        completion_field: str,
        validation: float,
        seed: int,
        *,
        reads_all: bool,
    ) -> BuiltFrom:
        """Return the record, given the files that were found for the inputs."""
        return cls(
            input=[os.fspath(path) for path in inputs],
            paths=[os.path.abspath(path) for path in inputs],
            sample=sample_of(files),
            content=content,
            text_field=text_field,
            prompt_field=prompt_field,
            completion_field=completion_field,
            validation=float(validation),
            seed=seed,
            reads_all=reads_all,
        )

    def is_named_as(self, inputs: Sequence[str | os.PathLike[str]]) -> bool:
        """Whether inputs have the recorded names or the recorded paths."""
        names = [os.fspath(path) for path in inputs]
        return names == self.input or [os.path.abspath(name) for name in names] == self.paths

    def difference(self, wanted: BuiltFrom) -> tuple[str, object, object] | None:
        """Return the differing settings: name, recorded value, wanted value.

        Inputs with unchanged names may have been moved together with the data set, and the same
        text may have been moved alone.
        """
        if not self.is_named_as(wanted.input) and wanted.sample != self.sample:
            return "input", ", ".join(self.input), ", ".join(wanted.input)
        fields = ("text_field",) if wanted.content == "text" else _RECORD_FIELDS
        for name in ("content", *fields, "validation"):
            was, wants = getattr(self, name), getattr(wanted, name)
            if was != wants:
                return name, was, wants
        if self.seed not in (None, wanted.seed) and self.validation:  # it chose what is held out
            return "seed", self.seed, wanted.seed
        return None

    def write(self, folder: Path) -> None:
        """Write the record into a folder that has none; its content is durable, its name is not."""
        content = self.model_dump(mode="json")
        text = json.dumps(content | {"checksum": checksum_of(content)}, indent=1) + "\n"
        durable.write_file(folder / BUILT_FROM_NAME, text.encode())


def sample_of(files: Sequence[Path]) -> str:
    """Return a hash of the files' names, sizes, beginnings and ends; "" if one is missing.

    The middle of a file is not read: a corpus may be large, and every start of a run computes this
    hash.
    """
    found = xxhash.xxh3_128()
    try:
        for path in sorted(files, key=lambda path: path.name):
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                found.update(f"{path.name}\0{size}\0".encode(errors="surrogateescape"))
                for begin in (0, max(0, size - _SAMPLE_BYTES)):
                    file.seek(begin)
                    found.update(file.read(_SAMPLE_BYTES))
    except OSError:
        return ""
    return found.hexdigest()


def read_built_from(folder: Path) -> BuiltFrom | None:
    """Return the record of the data set in `folder`; None if there is no record.

    Raises:
        CorruptionError: the file has changed since it was written.
        DataError: it cannot be read.
    """
    path = folder / BUILT_FROM_NAME
    advice = "restore the file from a copy, or delete it: the data set itself is whole without it"
    try:
        content = json.loads(read_plain(path, _MOST_BYTES))
        expected = content.pop("checksum", None)
        if checksum_of(content) != expected:
            raise CorruptionError(f"{path} does not match its checksum; {advice}")
        return BuiltFrom.model_validate(content)
    except FileNotFoundError:
        return None
    except NotPlainError as error:
        raise CorruptionError(f"{path}: {error.strerror}; {advice}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, RecursionError, ValidationError):
        raise CorruptionError(f"{path} does not say what was built; {advice}") from None
