"""Models and programs for planning: from the cache if they are there, else recorded and compiled.

Recording and compiling import `transformers` and all that traces, which takes seconds. A preset
that was planned before is read as its shapes and as the outlines of its programs instead. An entry
is found by a digest of this package's code, the versions of the libraries, the preset and the
options. It names the files of `transformers` whose classes the model has, with their digests. It
is read only in a process that has not imported `transformers`: nothing of it can be replaced there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.compiler.serialization import (
    MalformedError,
    NotSerializableError,
    read_outline,
    write_outline,
)
from penstock.config import Config, PresetModel
from penstock.engine import target_of
from penstock.planning.model_facts import ModelFacts, RememberedModel
from penstock.planning.program_cache.compile_messages import noticing
from penstock.planning.program_cache.entries import read_entry, remove_entry, write_entry
from penstock.planning.program_cache.versions import code_digest, file_digest, torch_settings
from penstock.program import Program
from penstock.telemetry import process_memory

if TYPE_CHECKING:
    from penstock.models import ModelSource

_LIBRARY = "transformers"


class OutlinedModels:
    """Models and their programs for planning, each made once.

    Args:
        record: returns the model of a configuration.
        compile_source: compiles a model; as `builders.compile_source`.
        remember: whether models that were recorded are kept for later processes. Beside them is
            kept how much memory the libraries take, which only a process that holds nothing else
            can measure: one of the command line, not one that has data or models of its own.
    """

    def __init__(
        self,
        record: Callable[[Config], ModelSource],
        compile_source: Callable[..., Program],
        *,
        remember: bool = False,
    ) -> None:
        self._record, self._compile_source = record, compile_source
        self._may_remember = remember
        self._models: dict[str, ModelFacts] = {}
        self._configs: dict[int, Config] = {}
        self._programs: dict[str, Program] = {}
        self._keys: dict[int, str | None] = {}
        self._resident: dict[int, int] = {}

    def model(self, config: Config) -> ModelFacts:
        """Return the model of a configuration; its errors are those of recording it."""
        name = repr((config.model, config.lora, config.sparsity.method is None))
        if name not in self._models:
            key = _model_key(config)
            found = None if key is None or _LIBRARY in sys.modules else _recalled(key)
            model = found or self._recorded(config, key)
            self._models[name] = model
            self._configs[id(model)], self._keys[id(model)] = config, key
        return self._models[name]

    def resident_bytes(self, model: ModelFacts) -> int | None:
        """Return the resident memory of a process that has recorded a model and not compiled it, as
        training that reads the program from the cache; None if that program is not cached."""
        if isinstance(model, RememberedModel):
            return model.resident_bytes
        return self._resident.get(id(model))

    def program(self, model: ModelFacts, **options: Any) -> Program:
        """Return the program of a model, or its outline.

        **Arguments:** `model` is one of `model`, or a `ModelSource`. `options` are those of
        `builders.compile_source`.
        """
        described = _described(options)
        name = f"{id(model)} {described}"
        if name not in self._programs:
            self._programs[name] = self._program(model, described, options)
        return self._programs[name]

    def _program(self, model: ModelFacts, described: str, options: dict[str, Any]) -> Program:
        target = target_of(options.get("device", "cpu"))
        model_key = self._keys.get(id(model))
        if model_key is None:
            return self._compile_source(self._source(model), **options)
        settings = repr(sorted(torch_settings(target.trace_device).items()))
        key = _digest(model_key, settings, described)
        if isinstance(model, RememberedModel) and (found := _outline(key)) is not None:
            return found
        source = self._source(model)
        with noticing() as noticed:
            program = self._compile_source(source, **options)
        if not noticed.anything:
            with contextlib.suppress(NotSerializableError):
                write_entry(key, write_outline(program), "outlines")
        return program

    def _source(self, model: ModelFacts) -> Any:
        """Return the model itself, to be compiled."""
        if not isinstance(model, RememberedModel):
            return model
        name = f"source of {model.key}"
        if name not in self._models:
            self._models[name] = self._recorded(self._configs[id(model)], model.key)
        return self._models[name]

    def _recorded(self, config: Config, key: str | None) -> ModelSource:
        source = self._record(config)
        libraries = _resident_at_first()
        if key is not None:
            self._resident[id(source)] = libraries
            if self._may_remember:
                _remember(key, source, libraries)
        return source


@functools.cache
def _resident_at_first() -> int:
    """Return the resident memory of this process when it recorded its first model: the libraries.
    What it has compiled since is not part of them."""
    return process_memory.resident_bytes()


def _model_key(config: Config) -> str | None:
    """Return the key of a model's entry; None if it has none.

    Initial masks depend on the modules and the weights, so a model with sparse weights has none.
    """
    if not isinstance(config.model, PresetModel) or config.sparsity.method is not None:
        return None
    sections = (config.model.model_dump(mode="json"), config.lora.model_dump(mode="json"))
    return _digest(code_digest(), json.dumps(sections, sort_keys=True, default=str))


def _recalled(key: str) -> RememberedModel | None:
    content = read_entry(key, "outlines")
    if content is None:
        return None
    try:
        have = json.loads(bytes(content))
        if have["files"] != _files(have["files"]):
            raise ValueError("the library has changed")
        model = RememberedModel.read(have["model"])
        if model.key != key:
            raise ValueError("the entry is that of another model")
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        remove_entry(key, "outlines")
        return None
    return model


def _remember(key: str, source: ModelSource, resident_bytes: int) -> None:
    model = RememberedModel.of(key, source, resident_bytes)
    if model is None or not source.from_library:
        return
    names = {
        base.__module__
        for child in source.module.modules()
        for base in type(child).__mro__
        if base.__module__.split(".")[0] == _LIBRARY
    }
    found = [Path(str(sys.modules[name].__file__)) for name in sorted(names)]
    root = _library_folder()
    files = _files({str(path.relative_to(root)): "" for path in found})
    content = json.dumps({"files": files, "model": model.written()})
    write_entry(key, content.encode(), "outlines")


def _files(names: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of files of the library."""
    root = _library_folder()
    return {name: file_digest(str(root / name)) for name in names}


def _library_folder() -> Path:
    spec = find_spec(_LIBRARY)  # does not import it
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _outline(key: str) -> Program | None:
    content = read_entry(key, "outlines")
    if content is None:
        return None
    try:
        return read_outline(content)
    except MalformedError:
        remove_entry(key, "outlines")
        return None


def _described(options: Mapping[str, Any]) -> str:
    """Return a text that differs for options that differ."""
    return repr(list(_sorted_items(options)))


def _sorted_items(options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(options.items()):
        if isinstance(value, frozenset | set):
            yield name, sorted(value)
        elif isinstance(value, Mapping):
            yield name, sorted(value.items())
        else:
            yield name, value


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(f"{len(part)}\0{part}".encode())
    return digest.hexdigest()
