"""Programs that tests share: compiling a model of some thousand weights takes a second, training it
for some steps a tenth.

A program depends on the model's configuration and on what `compile_source` is asked for, on nothing
else, and nothing of it ever changes. A module that came built is compiled anew for each test, since
its owner may have done anything to it, unless `always_the_same` says that it was not touched.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from penstock.models import ModelSource
from penstock.program import Program

Compile = Callable[..., Program]

_NAMES: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def always_the_same(source: ModelSource, name: str) -> ModelSource:
    """Return a source that came built, whose modules are the same whenever it has this name."""
    _NAMES[source.module] = name
    return source


def sharing_programs(compile_source: Compile) -> Compile:
    """Return `compile_source` as one that compiles a configuration once in this process."""
    # What was asked for lies beside the program, so that the identity in a key stays its own.
    programs: dict[str, tuple[dict[str, Any], Program]] = {}
    one_at_a_time = threading.Lock()  # PyTorch traces in one thread of a process

    @functools.wraps(compile_source)
    def compile_once(source: ModelSource, **asked: Any) -> Program:
        with one_at_a_time:
            if (key := _key(source, asked)) is None:
                return compile_source(source, **asked)
            if key not in programs:
                programs[key] = asked, compile_source(source, **asked)
            return programs[key][1]

    return compile_once


def _key(source: ModelSource, asked: dict[str, Any]) -> str | None:
    """Return what decides a program, as text; None for a module that may be any."""
    name = _NAMES.get(source.module)
    if name is None and (source.hf_config is None or source.values_fingerprint() is not None):
        return None
    config = source.hf_config
    parts = {
        "name": name or source.name,
        "class": source.class_name,
        "config": None if config is None else config.to_dict(),
        "attention": None if config is None else config._attn_implementation,
        "weights": source.weights_fingerprint(),
        "adapters": repr(source.adapters),
        "trainable": sorted(source.trainable),
        "asked": {**asked, "known": id(asked.get("known"))},
    }
    return json.dumps(parts, sort_keys=True, default=repr)
