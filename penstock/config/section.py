"""What all sections of the configuration share: strictness, and fields that explain themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """One section of the configuration: unknown keys refused, types strict, frozen once made."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=False,
        hide_input_in_errors=True,
    )


def _without_null(path: Path) -> Path:
    if "\0" in str(path):
        raise PydanticCustomError("zero", "expected a path, got one with a zero byte")
    return path


# Strictness is for scalars ("3" is no number, true is no 1); a list may stand for a tuple and a
# text for a path, since YAML has neither.
Patterns = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]
Counts = Annotated[tuple[int, ...], Field(strict=False)]
PathText = Annotated[Path, Field(strict=False), AfterValidator(_without_null)]


def setting(
    default: Any,
    description: str,
    *,
    unit: str | None = None,
    example: Any = None,
    **constraints: Any,
) -> Any:
    """Declare a field with its default, a sentence for people, and the unit of its number.

    `example` is what the error message and the starter show where the default is null or empty.
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
    """Declare a nested section, made of its defaults when the file does not mention it."""
    return Field(default_factory=factory, description=description)


def refuse(key: str, text: str) -> PydanticCustomError:
    """Return the error for `key` of the section being validated; the caller raises it.

    The key travels in the context, because a validator of a whole section has no way of its own
    to say which of its keys is at fault.
    """
    return PydanticCustomError("refused", "{text}", {"text": text, "key": key})
