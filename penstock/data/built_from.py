"""`built_from.json`: what a data set was made from, so that nobody trains on it for another text.

It lies beside `dataset.json` and is not part of what identifies a data set: equal text from two
places makes equal data sets. One that an older release built has none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock import durable
from penstock.data.manifest import Content, checksum_of
from penstock.errors import CorruptionError, DataError
from penstock.plain_file import NotPlainError, read_plain

BUILT_FROM_NAME = "built_from.json"
_MOST_BYTES = 16 << 20


class BuiltFrom(BaseModel):
    """What `build_dataset` was asked for. `paths` are the inputs as absolute paths."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    input: list[str]
    paths: list[str]
    content: Content
    prompt_field: str
    completion_field: str
    validation: float

    @classmethod
    def of(
        cls,
        inputs: Sequence[str | os.PathLike[str]],
        content: Content,
        prompt_field: str,
        completion_field: str,
        validation: float,
    ) -> BuiltFrom:
        return cls(
            input=[os.fspath(path) for path in inputs],
            paths=[os.path.abspath(path) for path in inputs],
            content=content,
            prompt_field=prompt_field,
            completion_field=completion_field,
            validation=float(validation),
        )

    def difference(self, wanted: BuiltFrom) -> tuple[str, object, object] | None:
        """Return what is wanted otherwise: its name, how it was, how it is wanted.

        Inputs that are named as they were may have been moved together with the data set.
        """
        if wanted.input != self.input and wanted.paths != self.paths:
            return "input", ", ".join(self.input), ", ".join(wanted.input)
        for name in ("content", "prompt_field", "completion_field", "validation"):
            was, wants = getattr(self, name), getattr(wanted, name)
            if was != wants and not (name.endswith("_field") and wanted.content == "text"):
                return name, was, wants
        return None

    def write(self, folder: Path) -> None:
        """Put it into a folder that has none; durable but for its name."""
        content = self.model_dump(mode="json")
        text = json.dumps(content | {"checksum": checksum_of(content)}, indent=1) + "\n"
        durable.write_file(folder / BUILT_FROM_NAME, text.encode())


def read_built_from(folder: Path) -> BuiltFrom | None:
    """Return what the data set in `folder` was made from; None where it does not say.

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
