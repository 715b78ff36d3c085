"""Compilation through the cache: a program is read if it was written before, else compiled."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from penstock.compiler import CompileOptions
from penstock.compiler.serialization import (
    MalformedError,
    NotSerializableError,
    deserialize,
    serialize,
)
from penstock.models import ModelSource
from penstock.planning.program_cache.compile_messages import noticing
from penstock.planning.program_cache.entries import read_entry, remove_entry, write_entry
from penstock.planning.program_cache.key import program_key
from penstock.program import Program

_WHOLE, _DIGEST = b"p", b"d"  # the first byte of an entry: a program, or its graph's digest alone


def cached_program(
    source: ModelSource,
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    options: CompileOptions,
    with_buffers: bool,
    known: Program | None,
    compile_now: Callable[[], Program],
) -> Program:
    """Return the program of a model from the cache, else compile and keep it.

    **Arguments:** as of the compilation. `known` is returned if it was compiled from the same
    graph. `compile_now` compiles; its errors are not cached. A compilation that gives a warning is
    not cached either, so that the next one gives the warning again.
    """
    key = program_key(source, module, inputs, options, with_buffers)
    if key is None:
        return compile_now()
    found = _read(key, known)
    if found is not None:
        return found
    with noticing() as noticed:
        program = compile_now()
    if not noticed.anything:
        _write(key, program, is_known=program is known)
    return program


def _read(key: str, known: Program | None) -> Program | None:
    """Return the program of an entry, or `known` if the entry says that it is the same."""
    content = read_entry(key)
    if content is None:
        return None
    if content[:1] == _DIGEST:
        is_same = known is not None and known.graph_digest.encode() == bytes(content[1:])
        return known if is_same else None
    try:
        if content[:1] != _WHOLE:
            raise MalformedError(f"expected an entry, got {bytes(content[:1])!r}")
        program = deserialize(content[1:])
    except MalformedError:
        remove_entry(key)
        return None
    is_same = known is not None and known.graph_digest == program.graph_digest
    return known if is_same else program


def _write(key: str, program: Program, is_known: bool) -> None:
    if is_known:
        write_entry(key, _DIGEST + program.graph_digest.encode())
        return
    try:
        written = serialize(program)
    except NotSerializableError:
        return  # compiled again at the next start
    write_entry(key, _WHOLE + written)
