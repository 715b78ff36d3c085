"""A checkpoint of any size comes in and goes out in the memory of a stage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def last_line(*command) -> object:
    """Run a Python script in a process of its own and return what its last line says."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_import_and_export_memory_is_independent_of_depth(tmp_path):
    shallow, deep = last_line(HERE / "huggingface_memory.py", tmp_path, 1, 8)
    assert deep["float32_bytes"] > 6 * shallow["float32_bytes"]
    for way in ("import", "export"):
        assert deep[way] < shallow[way] + (8 << 20)
        assert deep[way] < deep["float32_bytes"] / 3


@pytest.mark.slow
def test_four_gigabytes_are_imported_and_exported_within_one_and_a_half(tmp_path):
    found = last_line(ROOT / "benchmarks" / "checkpoint_io.py", "--folder", tmp_path)
    assert found["bytes"] > 3.9e9
    assert found["tensors_equal"]
    assert found["logits_distance"] < 1e-5
    assert found["value"] < 1.5
