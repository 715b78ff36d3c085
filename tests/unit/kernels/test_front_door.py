"""The package costs nothing until it is used, and what it compiled is found again."""

import importlib
import os
import subprocess
import sys

import pytest

import penstock.kernels


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_importing_the_package_does_not_import_numba():
    code = "import sys, penstock.kernels; print('numba' in sys.modules)"
    assert run(code) == "False"


def test_every_public_name_is_a_module():
    for name in penstock.kernels.__all__:
        importlib.import_module(f"penstock.kernels.{name}")


@pytest.mark.long
def test_compiled_code_is_cached_in_the_configured_folder(tmp_path):
    code = (
        "import numpy as np\n"
        "from penstock.kernels.split_master import _copy, split\n"
        "split(np.ones(9, np.float32), np.ones(9, np.uint16), np.ones(9, np.uint16))\n"
        "print(sum(_copy.__wrapped__.stats.cache_hits.values()))\n"
    )
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "0"
    assert list(tmp_path.rglob("*.nbi"))
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "1"
