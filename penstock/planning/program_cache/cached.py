"""Compilation through the cache: a program is read if it was written before, else compiled."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn

from penstock.compiler.serialization import (
    MalformedError,
    NotSerializableError,
    deserialize,
    serialize,
)
from penstock.planning.program_cache.compile_messages import noticing
from penstock.planning.program_cache.entries import read_entry, remove_entry, write_entry
from penstock.planning.program_cache.key import Request, program_key, remembered_key
from penstock.planning.program_cache.remembered import is_as_remembered, is_unchanged
from penstock.program import Program

_WHOLE, _DIGEST = b"p", b"d"  # the first byte of an entry: a program, or its graph's digest alone


def cached_program(
    request: Request,
    module: Callable[[], AbstractContextManager[nn.Module]],
    known: Program | None,
    compile_now: Callable[[nn.Module], Program],
) -> Program:
    """Return the program of a model from the cache, else compile and keep it.

    A compilation that gives a warning is not cached, so that the next one gives the warning again.

    Args:
        request: what is asked of the compilation.
        module: makes the context in which the model's module is in the modes of the compilation. A
            model that was recalled is recorded by it, so it is used only if the program's key is
            not known.
        known: returned if it was compiled from the same graph.
        compile_now: compiles the module; its errors are not cached.
    """
    source, remembered = request.source, remembered_key(request)
    if remembered is not None and not source.structure.is_recorded and is_unchanged():
        found = _read(_read_key(remembered), known)
        if found is not None:
            return found
    with module() as wanted:
        key = program_key(request, wanted)
        if key is None:
            return compile_now(wanted)
        found = _read(key, known)
        if found is None:
            with noticing() as noticed:
                found = compile_now(wanted)
            if noticed.anything:
                return found
            _write(key, found, is_known=found is known)
    if remembered is not None and is_as_remembered(source):
        write_entry(remembered, key.encode(), "models")
    return found


def _read_key(remembered: str) -> str | None:
    """Return the key of a program of a remembered model."""
    content = read_entry(remembered, "models")
    return None if content is None else bytes(content).decode()


def _read(key: str | None, known: Program | None) -> Program | None:
    """Return the program of an entry, or `known` if the entry says that it is the same."""
    content = None if key is None else read_entry(key)
    if key is None or content is None:
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
