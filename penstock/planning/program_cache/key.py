"""The name of a program in the cache: a digest of everything that determines the program."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from penstock.compiler import CompileOptions
from penstock.models import ModelSource
from penstock.planning.program_cache.digests import in_order
from penstock.planning.program_cache.modules import UndescribedError, describe
from penstock.planning.program_cache.versions import code_digest, torch_settings
from penstock.program import TensorSpec


@dataclass(frozen=True)
class Request:
    """What is asked of a compilation.

    Attributes:
        source: the model.
        goal: which of its modules is compiled, in which modes.
        inputs: one micro-batch.
        options: of the compiler.
        with_buffers: whether the program has the values of the model's buffers.
    """

    source: ModelSource
    goal: str
    inputs: Mapping[str, TensorSpec]
    options: CompileOptions
    with_buffers: bool


def program_key(request: Request, module: nn.Module) -> str | None:
    """Return the key of a program; None if something that determines the program has no
    description.

    **Arguments:** `module` of the model, in its modes, is what is compiled.
    """
    source = request.source
    if not source.from_library:
        return None
    try:
        described = list(describe(module))
    except UndescribedError:
        return None
    names = (source.name, source.task, source.structure.class_name, source.weight_prefix)
    return _digest(request, [str(names), *described, str(sorted(source.aliases.items()))])


def remembered_key(request: Request) -> str | None:
    """Return the key under which the cache has the program's key; None for a model that is not
    remembered.

    The model's key stands for its module, which need not be in this process.
    """
    key = request.source.key
    return None if key is None else _digest(request, [key.digest, request.goal])


def _digest(request: Request, model: Iterable[str]) -> str:
    """Return a digest of a request for a compilation, of a model with this description."""
    source, options = request.source, request.options
    digest = hashlib.blake2b(digest_size=32)

    def add(part: Any) -> None:
        digest.update(f"{part}\0".encode())

    add(code_digest())
    add(torch_settings(options.device))
    for field in fields(options):
        add((field.name, in_order(getattr(options, field.name))))
    for name, spec in request.inputs.items():
        add((name, tuple(spec.shape), spec.dtype))
    for part in model:
        add(part)
    add(request.with_buffers)
    if request.with_buffers:  # those that no file holds are made by the configuration
        add(source.buffers.stored_digest())
        add(source.buffer_seed if source.buffers.are_random else None)
    return digest.hexdigest()
