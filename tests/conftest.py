"""Makes this folder importable, so that tests may share the builders that lie in it."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import warm_start
from compiled_programs import sharing_kinds, sharing_programs
from slow_files import slowest_first
from speculated import QUICK_OFF, thin_modes

from penstock.compiler import build
from penstock.distributed.launchers import fork_client, local
from penstock.planning import builders
from penstock.store.flash.guesses import ENVIRONMENT_VARIABLE
from penstock.user_folders import cache_folder

_CACHE = "XDG_CACHE_HOME"
_OWN_CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the session, its workers and their commands an empty cache folder: programs that were
    compiled before the session are compiled again. Kernels are not: sources name their code."""
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder().parent))
        config.stash[_OWN_CACHE] = tempfile.mkdtemp(prefix="penstock-tests-cache-")
        os.environ[_CACHE] = config.stash[_OWN_CACHE]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's cache folder."""
    if _OWN_CACHE in config.stash:
        shutil.rmtree(config.stash[_OWN_CACHE], ignore_errors=True)


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


@pytest.hookimpl(tryfirst=True)  # before the selection by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin_modes(items)
    slowest_first(items)


@pytest.fixture(params=QUICK_OFF)
def speculated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How stores on flash speculate: a test that asks for this runs with each of the modes."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, request.param)
    return str(request.param)


@pytest.fixture(autouse=True, scope="session")
def _workers_are_warm() -> Iterator[None]:
    """What a run in this process starts, fork servers and workers, has imported everything."""
    fork_client.subprocess = local.subprocess = SimpleNamespace(
        **{**vars(subprocess), "Popen": warm_start.Popen}
    )
    yield
    fork_client.subprocess = local.subprocess = subprocess
    warm_start.end()
