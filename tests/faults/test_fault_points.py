"""Every fault point in the code is one at which some test kills; none is forgotten."""

import ast
import os
import sys
from pathlib import Path

import pytest
import test_checkpoint_faults
import test_flash_faults
import test_remote_shards
import test_shard_crashes
import warm_start
from journal_killer import KEEP, record, rotate_or_drop

import penstock
from penstock.store.flash.journal import Journal, read_records

KILLER = Path(__file__).with_name("journal_killer.py")
REPLACING = ("before_sync", "before_rename", "after_rename", "after_sync")
# What takes the prefix of such points behind so many arguments; some calls name none.
TAKES_PREFIX = {
    "put_file": 2,
    "put_pieces": 2,
    "replace_file": 2,
    "new_folder": 1,
    "_rewrite": 1,
    "rewrite_journal": 2,
}
JOURNAL_POINTS = [
    f"{what}/journal.{what}.{suffix}" for what in ("rotate", "drop") for suffix in REPLACING
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    orders = [f"{point}:1" for point in JOURNAL_POINTS]
    child = warm_start.run(
        [sys.executable, str(KILLER), str(folder), *orders],
        env={**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return folder


@pytest.mark.long
@pytest.mark.parametrize("point", JOURNAL_POINTS)
def test_killed_journal_rewrite_leaves_old_or_new_journal(point, killed):
    path = killed / f"{point}:1" / "journal"
    what, _, place = point.partition("/")
    renamed = "after" in place
    if what == "rotate":
        expected = [record(0), record(3)] if renamed else [record(n) for n in range(4)]
    else:
        expected = [record(n) for n in range(2 if renamed else 3)]
    assert read_records(path)[0] == expected
    again = Journal(path)
    again.append(record(9), KEEP)
    again.close()
    assert read_records(path)[0] == [*expected, record(9)]
    # What the crash left aside is in nobody's way.
    rotate_or_drop(path, what)
    assert [item.name for item in path.parent.iterdir()] == ["journal"]


def test_every_failpoint_has_a_test(tmp_path):
    # Its killer dies at every visit of a point in the fourth save.
    store = test_checkpoint_faults.save_steps(tmp_path, (1, 2, 3), seed=0)
    test_checkpoint_faults.train(store, 1, 0)
    visits = test_checkpoint_faults.save_watched(store, tmp_path)
    covered = {visit.partition(":")[0] for visit in visits}
    covered |= {point.partition("/")[2] for point in JOURNAL_POINTS} | {*test_flash_faults.POINTS}
    covered |= {*test_shard_crashes.POINTS, test_remote_shards.COPY_POINT}
    assert points_in_the_code() == covered


def points_in_the_code():
    """Return the names of all points: literal ones, and those of what is replaced as a whole."""
    found, replaced = set(), set()
    for path in Path(penstock.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called == "failpoints.point":
                name = node.args[0]
                if isinstance(name, ast.Constant):
                    found.add(name.value)
                else:  # the prefix comes from the caller of what replaces
                    assert path.name == "durable.py", f"{path}:{node.lineno}: a name, please"
            elif called == "_reached":
                assert node.args[1].value in REPLACING
            elif len(node.args) > TAKES_PREFIX.get(called.split(".")[-1], len(node.args)):
                prefix = node.args[-1]
                if isinstance(prefix, ast.Constant):
                    replaced.add(prefix.value)
                else:
                    assert ast.unparse(prefix) == "point", f"{path}:{node.lineno}"
    return found | {f"{prefix}.{suffix}" for prefix in replaced for suffix in REPLACING}
