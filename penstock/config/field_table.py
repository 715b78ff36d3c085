"""A table of keys for reference pages, made from the fields of a section."""

from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from penstock.config.document import dump_inline
from penstock.config.size import ByteSize


def field_table(rows: Iterable[tuple[str, FieldInfo]]) -> str:
    """Return a table in Markdown: key, allowed values, default and meaning of each field."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, info in rows:
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        unit = f" ({extra['unit']})" if "unit" in extra else ""
        default = "required" if info.is_required() else f"`{dump_inline(_plain(info))}`"
        meaning = (info.description or "").replace("|", "\\|")
        lines.append(f"| `{key}` | {_values(info.annotation)}{unit} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _values(annotation: Any) -> str:
    """Return the allowed values, in words."""
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "list"
    if get_origin(annotation) is dict:
        return "mapping"
    members = get_args(annotation)
    if members and isinstance(annotation, type) is False:
        if hasattr(annotation, "__metadata__"):
            return _values(members[0])
        return ", ".join(dict.fromkeys(_values(member) for member in members))
    words = {"int": "integer", "float": "number", "bool": "`true`, `false`", "str": "text"}
    words |= {"Path": "path", "ByteSize": "size"}
    return words.get(annotation.__name__, annotation.__name__)


def _plain(info: FieldInfo) -> Any:
    value = info.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        return list(value)
    plain = isinstance(value, int | float | bool | dict | None) and not isinstance(value, ByteSize)
    return value if plain else str(value)
