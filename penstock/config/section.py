"""Base of all sections of the configuration: strict validation, and fields with descriptions."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class Section(BaseModel):
    """One section of the configuration: unknown keys are rejected, types are strict, values are
    frozen."""

    whole: ClassVar[str] = "configuration"
    """What a file with the keys of this section is called in messages."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # of the mappings in `model`, which are not checked
        validate_default=False,
        hide_input_in_errors=True,
    )


_LONGEST_NAME_BYTES, _LONGEST_PATH_BYTES = 255, 4095  # of Linux and its file systems


def _usable(text: str) -> str:
    """Return the name of a place on disk, with the home folder for `~` at its beginning.

    An error says why no system call would take it.
    """
    if "\0" in text:
        raise PydanticCustomError("zero", "expected a path, got one with a zero byte")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "locale",
            "expected a path that this system's locale can write ({encoding}), got {got}; set "
            "LC_ALL=C.UTF-8 or PYTHONUTF8=1",
            {"encoding": sys.getfilesystemencoding(), "got": ascii(text)},
        ) from None
    longest = max(map(len, encoded.split(b"/")))
    if longest > _LONGEST_NAME_BYTES or len(encoded) > _LONGEST_PATH_BYTES:
        raise PydanticCustomError(
            "long",
            "expected a path of names of at most {name} bytes, {path} in all, got one with a name "
            "of {longest}, {length} in all; choose a shorter one",
            {
                "name": _LONGEST_NAME_BYTES,
                "path": _LONGEST_PATH_BYTES,
                "longest": longest,
                "length": len(encoded),
            },
        )
    return os.path.expanduser(text)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _usable_path(path: Path) -> Path:
    return Path(_usable(str(path)))


# Strictness is for scalars ("3" is no number, true is no 1); a list may stand for a tuple and a
# text for a path, since YAML has neither.
Patterns = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]
Counts = Annotated[tuple[int, ...], Field(strict=False)]
PathText = Annotated[Path, Field(strict=False), AfterValidator(_usable_path)]
Place = Annotated[str, AfterValidator(_usable)]
"""A path, or a word with a special meaning in place of a path."""
Places = Annotated[tuple[Place, ...], Field(strict=False), BeforeValidator(_listed)]
"""Several; one alone is a list of one."""


def setting(
    default: Any,
    description: str,
    *,
    unit: str | None = None,
    example: Any = None,
    **constraints: Any,
) -> Any:
    """Declare a field with its default, a sentence for people, and the unit of its number.

    The error message and the starter show `example` if the default is null or empty.
    """
    extra: dict[str, Any] = {}
    if unit is not None:
        extra["unit"] = unit
    if example is not None:
        extra["example"] = example
    return Field(
        default=default, description=description, json_schema_extra=extra or None, **constraints
    )


def section(factory: type[Section], description: str) -> Any:
    """Declare a nested section; if the file does not mention it, it consists of its defaults."""
    return Field(default_factory=factory, description=description)


def refuse(key: str, text: str) -> PydanticCustomError:
    """Return the error for `key` of the section being validated; the caller raises it.

    The key is passed in the context, because a validator of a whole section cannot otherwise name
    the invalid key.
    """
    return PydanticCustomError("refused", "{text}", {"text": text, "key": key})


def refuse_all(problems: Sequence[PydanticCustomError]) -> None:
    """Raise all problems of the section being validated at once, each made by `refuse`."""
    if problems:
        raise ValidationError.from_exception_data(
            "section", [InitErrorDetails(type=problem, input=None) for problem in problems]
        )
