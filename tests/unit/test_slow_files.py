"""The slow test files exist, and their tests come first."""

from pathlib import Path
from types import SimpleNamespace

from slow_files import SLOWEST, slowest_first

ROOT = Path(__file__).resolve().parents[2]


def test_listed_files_exist():
    assert [name for name in SLOWEST if not (ROOT / name).is_file()] == []


def test_tests_of_slow_files_come_first_and_the_others_keep_their_order():
    names = [
        "tests/unit/test_z.py::test_first",
        f"{SLOWEST[1]}::test_b",
        "tests/unit/test_a.py::test_second",
        f"{SLOWEST[0]}::test_d[case::1]",
        f"{SLOWEST[0]}::test_c",
    ]
    items = [SimpleNamespace(nodeid=name) for name in names]
    slowest_first(items)
    assert [item.nodeid for item in items] == [names[place] for place in (3, 4, 1, 0, 2)]
