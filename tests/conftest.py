"""Makes this folder importable, so that tests may share the builders that lie in it."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import warm_start
from compiled_programs import sharing_kinds, sharing_programs

from penstock.compiler import build
from penstock.distributed.launchers import fork_client, local
from penstock.planning import builders

gc.disable()  # until the tests are collected: thousands of objects that all stay


@pytest.fixture(autouse=True, scope="session")
def _programs_are_shared() -> Iterator[None]:
    """What a test has compiled, others in its process use again."""
    compile_source, make_kind = builders.compile_source, build.make_kind
    builders.compile_source = sharing_programs(compile_source)
    build.make_kind = sharing_kinds(make_kind)
    gc.collect()
    gc.freeze()  # the collector need not traverse the libraries again and again
    gc.enable()
    yield
    builders.compile_source, build.make_kind = compile_source, make_kind


@pytest.fixture(autouse=True, scope="session")
def _workers_are_warm() -> Iterator[None]:
    """What a run in this process starts, fork servers and workers, has imported everything."""
    fork_client.subprocess = local.subprocess = SimpleNamespace(
        **{**vars(subprocess), "Popen": warm_start.Popen}
    )
    yield
    fork_client.subprocess = local.subprocess = subprocess
    warm_start.end()
