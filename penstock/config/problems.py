"""Converts a failed validation into lines that a user can act on.

One line per problem: place, key, expected value, actual value, next action. The place is
`file:line`, or the command-line argument, or nothing for a configuration created in Python.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from penstock.config.document import KeyPath, dump_inline
from penstock.config.model import FORM_CLASSES
from penstock.errors import did_you_mean

# Names of keys in other trainers.
VALUES_ELSEWHERE = {"gpu": "cuda", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
"""Values under their usual other names."""

NAMES_ELSEWHERE = {
    "batch_size": "batch.size",
    "eval": "evaluation",
    "lr": "optimizer.learning_rate",
    "max_grad_norm": "optimizer.clip_norm",
    "max_length": "data.sequence_length",
    "max_steps": "run.steps",
    "output_dir": "run.dir",
}


@dataclass
class Origin:
    """The origin of values: a file's name, its line per key, and overrides by key."""

    name: str | None = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overridden: dict[KeyPath, str] = field(default_factory=dict)

    def line(self, path: KeyPath) -> int:
        """Return the line of a key or of the nearest section around it; overrides come last."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.overridden:
                break
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 10**9

    def place(self, path: KeyPath) -> str:
        """Return the place of a key, or of the nearest section around it, ending in `: `."""
        for key, text in self.overridden.items():  # a value within the wrong one, or around it
            if key[: len(path)] == path or path[: len(key)] == key:
                return f"command line, {text}: "
        for length in range(len(path), 0, -1):
            line = self.lines.get(path[:length])
            if line is not None:
                return f"{self.name}:{line}: "
        return f"{self.name}: " if self.name else ""

    def named(self, path: KeyPath, name: str | None = None) -> str:
        """Return the place and the name of a key, ending in `: `; a command-line argument that sets
        the key names it already."""
        place = self.place(path)
        names_key = place == f"command line, {self.overridden.get(path)}: "
        return place if names_key else f"{place}{name or dotted(path)}: "


def explain(error: ValidationError, root: type[BaseModel], origin: Origin) -> str:
    """Return one line per problem of a failed validation, in the order of the file."""
    lines: list[tuple[tuple[int, int], str]] = []
    problems = error.errors(include_url=False)
    paths = [_key_path(problem) for problem in problems]
    for number, (problem, path) in enumerate(zip(problems, paths, strict=True)):
        if problem["type"] == "too_short" and any(p[:-1] == path for p in paths if p):
            continue  # pydantic does not count the wrong values of the list, which are named
        key = dotted(path) if path else _name_of(root)
        text = f"{origin.named(path, key)}{_text(problem, path, root)}"
        lines.append(((origin.line(path), number), text))
    return "\n".join(dict.fromkeys(text for _, text in sorted(lines)))


def dotted(path: KeyPath) -> str:
    """Return `optimizer.groups[0].match` for a key path."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "configuration"


def _key_path(problem: Any) -> KeyPath:
    path = list(problem["loc"])
    # pydantic's path contains the form of the model as a tag, which is no key of the file.
    if len(path) > 1 and path[0] == "model":
        del path[1]
    if problem["type"] == "refused":
        keys = problem["ctx"]["key"].split(".")
        path += [int(key) if key.isdigit() else key for key in keys]
    return tuple(path)


def _text(problem: Any, path: KeyPath, root: type[BaseModel]) -> str:
    kind, value, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown_key(path, root, problem["loc"])
    if kind == "missing":
        what = "item" if isinstance(path[-1], int) else "key"
        return f"missing {what}; add it"
    expected = _expected(kind, context)
    if expected is None:
        return problem["msg"]
    got = f", got {_shown(value)}"
    if kind == "literal_error":
        choices = _choices(path, root)
        usual = VALUES_ELSEWHERE.get(str(value).lower())
        word = usual if usual in choices else str(value)
        return f"expected {expected}{got}{did_you_mean(word, choices)}"
    return f"expected {expected}{got}{_remedy(path, root)}"


def _unknown_key(path: KeyPath, root: type[BaseModel], place: tuple[str | int, ...]) -> str:
    owner = _section(path[:-1], root)
    if owner is None and path[0] == "model":
        owner = FORM_CLASSES.get(str(place[1]))
    known = list(owner.model_fields) if owner else []
    name = dotted(path[:-1]) if len(path) > 1 else f"a {_name_of(root)}"
    word = str(path[-1])
    if word + "s" in known or word.removesuffix("s") in known:  # rather than a key elsewhere
        hint = did_you_mean(word, known)
    else:
        hint = _elsewhere(word, root) or did_you_mean(word, known)
    return f"unknown key{hint}; {name} has {', '.join(known)}"


def _elsewhere(word: str, root: type[BaseModel]) -> str:
    """Return ` (did you mean 'run.steps'?)`: a key of another section, or of another trainer."""
    found = [repr(dotted(path)) for path in _keys(root) if path[-1] == word]
    other = NAMES_ELSEWHERE.get(word)
    if not found and other is not None and other.partition(".")[0] in root.model_fields:
        found = [repr(other)]
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def _keys(owner: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all keys with a plain value, except those in items of lists."""
    for name, info in owner.model_fields.items():
        inner = _inner_section(info.annotation)
        if inner is None:
            yield (*prefix, name)
        elif not _is_list(info.annotation):
            yield from _keys(inner, (*prefix, name))


def _expected(kind: str, context: dict[str, Any]) -> str | None:
    """Return in words what a built-in check of pydantic expected; None for Penstock's own
    checks."""
    bounds = {
        "greater_than": ("a number above", "gt"),
        "greater_than_equal": ("a number from", "ge"),
        "less_than": ("a number below", "lt"),
        "less_than_equal": ("a number up to", "le"),
    }
    if kind in bounds:
        words, key = bounds[kind]
        return f"{words} {context[key]:g}" + (" up" if key == "ge" else "")
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    if kind == "too_long":
        return f"a list of at most {context['max_length']}"
    if kind == "literal_error":
        return "one of " + context["expected"].replace("'", "").replace(" or ", ", ")
    return {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "a text",
        "path_type": "a path",
        "tuple_type": "a list",
        "list_type": "a list",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "model_attributes_type": "a mapping",
    }.get(kind)


def _remedy(path: KeyPath, root: type[BaseModel]) -> str:
    """Return the next action: the default or example of the field, with its unit."""
    info = _field(path, root)
    owner = _section(path, root)
    if owner is not None and (
        isinstance(path[-1], int)
        or info is None
        or info.default_factory
        or not _is_list(info.annotation)
    ):
        return f"; it has the keys {', '.join(owner.model_fields)}"
    if owner is not None and info is not None and info.is_required():
        return f"; each item has the keys {', '.join(owner.model_fields)}"
    if info is None:
        around = _field(path[:-1], root)  # a value in a mapping of plain values
        if around is None or around.annotation is None or get_origin(around.annotation) is not dict:
            return ""
        path, info = path[:-1], around
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    example = extra.get("example", None if info.is_required() else info.get_default())
    if example is None or example == ():
        return ""
    key = dotted(tuple(part for part in path if isinstance(part, str)))
    unit = f" ({extra['unit']})" if "unit" in extra else ""
    return f"; for example {key}: {dump_inline(_plain(example))}{unit}"


def _shown(value: Any) -> str:
    if isinstance(value, str | Path):
        return repr(str(value))
    if value is None or isinstance(value, bool | int | float):
        return dump_inline(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if isinstance(value, dict):
        return f"a mapping with {', '.join(map(str, value))}" if value else "an empty mapping"
    return repr(value)


def _field(path: KeyPath, root: type[BaseModel]) -> FieldInfo | None:
    names = [part for part in path if isinstance(part, str)]
    owner = _section(tuple(names[:-1]), root) if len(names) > 1 else root
    return owner.model_fields.get(names[-1]) if owner and names else None


def _choices(path: KeyPath, root: type[BaseModel]) -> list[str]:
    info = _field(path, root)
    return [str(choice) for choice in get_args(info.annotation)] if info else []


def _section(path: KeyPath, root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the section class at a path, also inside lists; None for a plain value."""
    owner: type[BaseModel] = root
    for part in path:
        if isinstance(part, int):
            continue
        info = owner.model_fields.get(part)
        inner = _inner_section(info.annotation) if info else None
        if inner is None:
            return None
        owner = inner
    return owner


def _inner_section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if _is_list(annotation):
        return next((found for a in get_args(annotation) if (found := _inner_section(a))), None)
    if isinstance(annotation, UnionType):
        sections = [found for a in get_args(annotation) if (found := _inner_section(a))]
        return sections[0] if len(sections) == 1 else None
    return None


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple


def _name_of(root: type[BaseModel]) -> str:
    return str(getattr(root, "whole", "configuration"))


def _plain(value: Any) -> Any:
    """Return a default in a form that YAML can represent."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value
