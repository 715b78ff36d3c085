"""Files of core parameters: reads them, explains what is wrong with them, and writes them.

A file gives the figures that differ from a named set:

    name: mine
    base: silicon
    clock_hz: 0.85e9
    sources: {clock_hz: "published: the SDK"}
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config import FileKind, Origin, dump_tables, read
from penstock.errors import ConfigError, did_you_mean
from penstock.wafer.parameters import SILICON, SIM, CoreParameters, figure_fields

_SUFFIXES = (".yaml", ".yml")
_MOST_BYTES = 1 << 20
_NAMED = {"sim": SIM, "silicon": SILICON}


def known_parameters() -> list[str]:
    """Return the names of the sets that need no file."""
    return list(_NAMED)


def load_parameters(name_or_path: str | Path) -> CoreParameters:
    """Return `SIM` or `SILICON` by its name, or the set that a YAML file describes.

    A text without a folder and without the ending `.yaml` is a name. Raises `ConfigError` with one
    line per problem.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith(_SUFFIXES):
        return _load_file(Path(name_or_path))
    if text not in _NAMED:
        raise ConfigError(
            f"expected core parameters, {' or '.join(_NAMED)}, or the path of a file that ends in "
            f".yaml, got {text!r}{did_you_mean(text, _NAMED)}"
        )
    return _NAMED[text]


def dump_parameters(parameters: CoreParameters) -> str:
    """Return a set as YAML that `load_parameters` reads back as an equal set."""
    names = ("name", *figure_fields())
    figures = {name: getattr(parameters, name) for name in names}
    return dump_tables({**figures, "sources": dict(parameters.sources)})


def _load_file(path: Path) -> CoreParameters:
    start = f"give {' or '.join(_NAMED)}, or a file such as {{name: mine, base: silicon}}"
    data, lines = read(path, FileKind("name: mine", start, _MOST_BYTES))
    origin = Origin(name=str(path), lines=lines)
    if not data:
        raise ConfigError(f"{path}: expected core parameters, got an empty file; {start}")
    problems = _wrong_keys(data, origin)
    if problems:
        raise ConfigError("\n".join(problems))
    base = _NAMED[data.get("base", "sim")]
    figures = {key: value for key, value in data.items() if key in figure_fields()}
    # A figure that is replaced has no longer the source of the set.
    sources = {key: text for key, text in base.sources.items() if key not in figures}
    sources |= data.get("sources", {})
    name = data.get("name", path.stem)
    try:
        return dataclasses.replace(base, name=name, sources=sources, **figures)
    except ConfigError as error:
        texts = [
            f"{origin.place((text.partition(':')[0],))}{text}" for text in str(error).splitlines()
        ]
        raise ConfigError("\n".join(texts)) from None


def _wrong_keys(data: Mapping[str, Any], origin: Origin) -> list[str]:
    """Return what is wrong with a file before its figures are looked at."""
    known = ["name", "base", *figure_fields(), "sources"]
    problems = [_unknown_key(key, known, origin) for key in data if key not in known]
    base = data.get("base", "sim")
    if not isinstance(base, str) or base not in _NAMED:
        problems.append(
            f"{origin.place(('base',))}base: expected {' or '.join(_NAMED)}, got {base!r}"
        )
    sources = data.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(v, str) for v in sources.values()):
        problems.append(
            f"{origin.place(('sources',))}sources: expected a text for each figure, such as "
            '{clock_hz: "published: the SDK"}'
        )
    return problems


def _unknown_key(key: Any, known: list[str], origin: Origin) -> str:
    """Return the error of a key that core parameters do not have; all that they have are listed
    only if none is similar."""
    near = did_you_mean(str(key), known)
    listed = "" if near else f"; core parameters have {', '.join(known)}"
    return f"{origin.place((key,))}{key}: unknown key{near}{listed}"
