"""Makes this folder importable, so that tests may share the builders that lie in it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import warm_start
from compiled_programs import sharing_programs

from penstock.distributed.launchers import fork_client, local
from penstock.planning import builders


@pytest.fixture(autouse=True, scope="session")
def _programs_are_shared() -> Iterator[None]:
    """A run of this process compiles a configuration that another test has compiled no more."""
    compile_source = builders.compile_source
    builders.compile_source = sharing_programs(compile_source)
    yield
    builders.compile_source = compile_source


@pytest.fixture(autouse=True, scope="session")
def _workers_are_warm() -> Iterator[None]:
    """What a run in this process starts, fork servers and workers, has imported everything."""
    fork_client.subprocess = local.subprocess = SimpleNamespace(
        **{**vars(subprocess), "Popen": warm_start.Popen}
    )
    yield
    fork_client.subprocess = local.subprocess = subprocess
    warm_start.end()
