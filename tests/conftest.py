"""Makes this folder importable, so that tests may share the builders that lie in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from compiled_programs import sharing_programs

from penstock.planning import builders


@pytest.fixture(autouse=True, scope="session")
def _programs_are_shared() -> Iterator[None]:
    """A run of this process compiles a configuration that another test has compiled no more."""
    compile_source = builders.compile_source
    builders.compile_source = sharing_programs(compile_source)
    yield
    builders.compile_source = compile_source
