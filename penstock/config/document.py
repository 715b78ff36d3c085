"""YAML input with the line of every key, and YAML output.

PyYAML follows YAML 1.1, where `1e-4` is a string, `no` is false and `1:30` is ninety. Here a plain
scalar has the type of its form: null, true/false, an integer, a number, else a string (YAML 1.2).
Output is equal in both: a string is quoted if either version would read another type.
"""

import errno
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from penstock.errors import ConfigError
from penstock.io import read_plain

MAX_BYTES = 16 << 20
_MOST_VALUES = 100_000  # with aliases expanded: a short file can stand for any number of values
_MOST_DIGITS = 400

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars; a duplicate key is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            _refuse(node, "expected a mapping")
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, Hashable):
                _refuse(key_node, "a list or a mapping cannot be a key")
            if key in seen:
                _refuse(
                    key_node, f"key {key!r} is given twice, first on line {seen[key]}; keep one"
                )
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


class NumberTooLarge(yaml.constructor.ConstructorError):
    """A whole number that no key could have; the file is valid YAML."""


def _refuse(node: yaml.Node, what: str) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)


_KINDS = ("null", "bool", "int", "float", "str", "seq", "map")
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in _KINDS}
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9](?:_?[0-9])*|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9](?:_?[0-9])*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    number = 2**64  # too many digits for Python to parse
    if len(text) <= _MOST_DIGITS:
        try:
            number = int(text, 16) if text.lower().startswith("0x") else int(text, 10)
        except ValueError:
            _refuse(node, f"{text!r} is not an integer")
    if abs(number) >= 2**64:
        count = len(text.lstrip("+-").lower().removeprefix("0x"))
        what = f"expected whole numbers between -2^64 and 2^64, got one of {count:,} digits"
        raise NumberTooLarge(None, None, what, node.start_mark)
    return number


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).replace("_", "").lower()
    try:
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        _refuse(node, f"{text!r} is not a number")


def _bool(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    text = str(loader.construct_scalar(node)).lower()
    if text not in ("true", "false"):
        _refuse(node, f"{text!r} is neither true nor false")
    return text == "true"


_Loader.add_constructor("tag:yaml.org,2002:bool", _bool)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


@dataclass(frozen=True)
class FileKind:
    """What a file is, for its size limit and for messages about it.

    `example` is its first line, `start` says how to get such a file.
    """

    example: str = "model: gpt2"
    start: str = "`penstock init {path}` writes a starter there"
    most_bytes: int = MAX_BYTES


RUN_FILE = FileKind()


def read(path: Path, kind: FileKind = RUN_FILE) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Return a file's mapping and, per key path, the line (from 1) on which it stands.

    Raises `ConfigError` for a file that is missing, unreadable, no YAML, or no mapping.
    """
    try:
        text = read_plain(path, kind.most_bytes).decode()
    except FileNotFoundError:
        start = kind.start.replace("{path}", str(path))
        raise ConfigError(f"{path}: no such file; {start}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected UTF-8 text, got byte {error.object[error.start]:#04x} at "
            f"{error.start}; is it a YAML file?"
        ) from None
    except OSError as error:
        what = "expected a YAML file, got a folder" if path.is_dir() else error.strerror
        if error.errno == errno.EFBIG:
            what = f"{what}; give another file"
        raise ConfigError(f"{path}: cannot be read: {what}") from None
    return parse(text, str(path), kind)


def parse(
    text: str, name: str, kind: FileKind = RUN_FILE
) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Do the same as `read` for a string; `name` precedes the line in messages."""
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    try:
        node = _compose(loader)
        value = {} if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f":{mark.line + 1}"
        invalid = "" if isinstance(error, NumberTooLarge) else "not valid YAML: "
        raise ConfigError(f"{name}{line}: {invalid}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply") from None
    finally:
        loader.dispose()
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{name}:1: expected keys and values such as `{kind.example}`, got {value!r:.60}"
        )
    lines: dict[KeyPath, int] = {}
    _collect_lines(node, (), lines, depth=0)
    return value, lines


def parse_scalar(text: str) -> Any:
    """Return the value of a `key=value` override: a scalar, or YAML such as `[0.9, 0.99]`."""
    loader = _Loader(text)
    try:
        node = _compose(loader)
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _compose(loader: _Loader) -> Any:
    """Return the document's root node, of limited size and with the tags that a configuration may
    use."""
    root = loader.get_single_node()
    waiting, count = [root] if root is not None else [], 0
    while waiting:
        node = waiting.pop()
        count += 1
        if node.tag not in _TAGS:
            _refuse(node, f"unknown tag {node.tag!r}; remove it")
        if count > _MOST_VALUES:  # or an alias that contains itself
            _refuse(node, f"more than {_MOST_VALUES:,} values, after its aliases are expanded")
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value
    return root


class _Dumper(yaml.SafeDumper):
    """Strings are quoted where `_Loader` or a reader of YAML 1.1 would read another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _TableDumper(_Dumper):
    """Lists of plain values on one line."""


def _text(dumper: _Dumper, data: str) -> yaml.Node:
    # PyYAML's other styles do not keep every line break.
    style = '"' if any(character in data for character in _LINE_BREAKS) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


def _short_list(dumper: _TableDumper, data: list[Any]) -> yaml.Node:
    flow = not any(isinstance(item, list | dict) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_OLDER = yaml.SafeDumper.yaml_implicit_resolvers
_Dumper.yaml_implicit_resolvers = {  # the first that matches decides: those of `_Loader` come first
    first: [*_Loader.yaml_implicit_resolvers.get(first, []), *_OLDER.get(first, [])]
    for first in {**_Loader.yaml_implicit_resolvers, **_OLDER}
}
_LINE_BREAKS = "\n\r\x85\u2028\u2029"
_Dumper.add_representer(str, _text)
_TableDumper.add_representer(list, _short_list)


def dump(value: Any) -> str:
    """Return JSON-able values as YAML in their own order; `parse` returns equal values."""
    return _dump(value, _Dumper)


def dump_tables(value: Any) -> str:
    """Return JSON-able values as YAML in their own order, each list of plain values on one line."""
    return _dump(value, _TableDumper)


def dump_inline(value: Any) -> str:
    """Return JSON-able values as YAML on one line."""
    text = _dump(value, _Dumper, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _dump(value: Any, dumper: type[_Dumper], **options: Any) -> str:
    options = {"sort_keys": False, "allow_unicode": True, "width": 100, **options}
    return str(yaml.dump(value, Dumper=dumper, **options))


def _collect_lines(node: Any, path: KeyPath, lines: dict[KeyPath, int], depth: int) -> None:
    # A file has few levels; the limit stops an alias that contains itself.
    if depth > 20:
        return
    if isinstance(node, yaml.MappingNode):
        for key_node, item in node.value:
            here = (*path, key_node.value)
            lines[here] = key_node.start_mark.line + 1
            _collect_lines(item, here, lines, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            here = (*path, number)
            lines[here] = item.start_mark.line + 1
            _collect_lines(item, here, lines, depth + 1)
