"""The name of a program in the cache: a digest of everything that determines the program."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from penstock.compiler import CompileOptions
from penstock.models import ModelSource
from penstock.planning.program_cache.modules import UndescribedError, describe
from penstock.planning.program_cache.versions import code_digest, torch_settings


def program_key(
    source: ModelSource,
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    options: CompileOptions,
    with_buffers: bool,
) -> str | None:
    """Return the key of a program; None if something that determines the program has no
    description.

    **Arguments:** those of the compilation: `module` of `source` in its modes, and `inputs`, one
    micro-batch.
    """
    if not source.from_library:
        return None
    digest = hashlib.blake2b(digest_size=32)

    def add(part: Any) -> None:
        digest.update(f"{part}\0".encode())

    add(code_digest())
    add(torch_settings(options.device))
    add((source.name, source.task, source.class_name, source.weight_prefix))
    for field in fields(options):
        add((field.name, _sorted(getattr(options, field.name))))
    for name, value in inputs.items():
        add((name, tuple(value.shape), value.dtype))
    try:
        for line in describe(module):
            add(line)
    except UndescribedError:
        return None
    add(sorted(source.aliases.items()))
    add(with_buffers)
    if with_buffers:  # those that no file holds are made by the configuration, perhaps at random
        add(source.buffers.stored_digest())
        add(source.buffer_seed if source.buffers.are_random else None)
    return digest.hexdigest()


def _sorted(value: Any) -> Any:
    """Return a value whose text does not depend on the order of its elements."""
    if isinstance(value, Mapping):
        return sorted(value.items())
    return sorted(value) if isinstance(value, frozenset) else value
