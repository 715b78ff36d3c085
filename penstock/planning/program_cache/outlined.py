"""Models and outlines of programs, for plans and tables.

Compiling imports all that traces, which takes seconds. The outline of a program that was compiled
before is read instead, if its model was recalled (`remembered.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from penstock.compiler.serialization import (
    MalformedError,
    NotSerializableError,
    read_outline,
    write_outline,
)
from penstock.config import Config
from penstock.engine import target_of
from penstock.models import ModelSource
from penstock.planning.program_cache.compile_messages import noticing
from penstock.planning.program_cache.digests import digest_of, in_order
from penstock.planning.program_cache.entries import read_entry, remove_entry, write_entry
from penstock.planning.program_cache.remembered import is_as_remembered, is_unchanged
from penstock.planning.program_cache.versions import torch_settings
from penstock.program import Program


class OutlinedModels:
    """Models and their programs for planning, each made once.

    Args:
        record: returns the model of a configuration.
        compile_source: compiles a model; as `builders.compile_source`.
    """

    def __init__(
        self, record: Callable[[Config], ModelSource], compile_source: Callable[..., Program]
    ) -> None:
        self._record, self._compile_source = record, compile_source
        self._models: dict[str, ModelSource] = {}
        self._programs: dict[str, Program] = {}

    def model(self, config: Config) -> ModelSource:
        """Return the model of a configuration; its errors are those of recording it."""
        name = repr((config.model, config.lora))
        if name not in self._models:
            self._models[name] = self._record(config)
        return self._models[name]

    def program(self, model: ModelSource, **options: Any) -> Program:
        """Return the program of a model, or its outline.

        **Arguments:** `options` are those of `builders.compile_source`.
        """
        described = _described(options)
        name = f"{id(model)} {described}"
        if name not in self._programs:
            self._programs[name] = self._program(model, described, options)
        return self._programs[name]

    def _program(self, model: ModelSource, described: str, options: dict[str, Any]) -> Program:
        if model.key is None:
            return self._compile_source(model, **options)
        target = target_of(options.get("device", "cpu"))
        settings = repr(sorted(torch_settings(target.trace_device).items()))
        key = digest_of(model.key.digest, settings, described)
        is_recalled = not model.structure.is_recorded and is_unchanged()
        if is_recalled and (found := _outline(key)) is not None:
            return found
        with noticing() as noticed:
            program = self._compile_source(model, **options)
        if not noticed.anything and is_as_remembered(model):
            with contextlib.suppress(NotSerializableError):
                write_entry(key, write_outline(program), "outlines")
        return program


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
    return repr([(name, in_order(value)) for name, value in sorted(options.items())])
