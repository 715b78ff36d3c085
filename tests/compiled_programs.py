"""Programs and kinds that tests of one process share: compiling a small model takes a second.

A program depends on the model's configuration, on its buffers, on the types of its weights and on
what `compile_source` is asked for. A module that the test built is compiled anew, since its owner
may have changed it, unless `always_the_same` names it. The kinds of its stages are shared all the
same: they depend on their graphs alone.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from penstock.compiler import matmul_backend
from penstock.models import ModelSource
from penstock.program import Kind, Program

Compile = Callable[..., Program]
MakeKind = Callable[..., Kind]

_NAMES: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def always_the_same(source: ModelSource, name: str) -> ModelSource:
    """Return a source that came built, whose modules are the same whenever it has this name."""
    _NAMES[source.module] = name
    return source


def sharing_programs(compile_source: Compile) -> Compile:
    """Return `compile_source` as a function that compiles a configuration once in this process."""
    # The arguments are kept beside the program, so that an identity in a key stays unique.
    programs: dict[str, tuple[dict[str, Any], Program]] = {}
    one_at_a_time = threading.Lock()  # PyTorch traces in one thread of a process

    @functools.wraps(compile_source)
    def compile_once(source: ModelSource, **arguments: Any) -> Program:
        with one_at_a_time:
            if (key := _key(source, arguments)) is None:
                return compile_source(source, **arguments)
            if key not in programs:
                programs[key] = arguments, compile_source(source, **arguments)
            return programs[key][1]

    return compile_once


def sharing_kinds(make_kind: MakeKind) -> MakeKind:
    """Return `make_kind` as a function that compiles a stage's graph once in this process."""
    kinds: dict[tuple[Any, ...], Kind] = {}

    @functools.wraps(make_kind)
    def make_once(
        name: str, digest: str, graph: Any, signature: Any, device: str, products: str
    ) -> Kind:
        # A test may change the size from which a library is chosen.
        key = (name, digest, signature, device, products, matmul_backend._LEAST_FLOPS)
        if key not in kinds:
            kinds[key] = make_kind(name, digest, graph, signature, device, products)
        return kinds[key]

    return make_once


def _key(source: ModelSource, arguments: dict[str, Any]) -> str | None:
    """Return what determines a program, as text; None for a module that a test built."""
    name = _NAMES.get(source.module)
    if name is None and (source.hf_config is None or source.values_fingerprint() is not None):
        return None
    config = source.hf_config
    parts = {
        "name": name or source.name,
        "class": source.structure.class_name,
        "config": None if config is None else config.to_dict(),
        "attention": None if config is None else config._attn_implementation,
        "shapes": source.shapes(),
        "bfloat16": sorted(source.bfloat16),
        "buffers": {
            name: _digest(value) for name, value in sorted(source.buffers.values().items())
        },
        "adapters": repr(source.adapters),
        "trainable": sorted(source.trainable),
        "arguments": {**arguments, "known": id(arguments.get("known"))},
        "least FLOPs": matmul_backend._LEAST_FLOPS,  # which a test may change
    }
    return json.dumps(parts, sort_keys=True, default=repr)


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {hashlib.blake2b(values.numpy().tobytes()).hexdigest()}"
