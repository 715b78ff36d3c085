"""The list of slow test files names files that are there."""

from pathlib import Path

from slow_files import SLOWEST

ROOT = Path(__file__).resolve().parents[2]


def test_listed_files_exist():
    assert [name for name in SLOWEST if not (ROOT / name).is_file()] == []
