"""Every call in the code that syncs is needed: without any one of them, some crash costs something.

Each scenario is a piece of work that promises what it has made durable, and a check that the
promise is kept. It is run on a disk that acknowledges one sync and does not make it, and crashes
there: that must be noticed, while the same crash costs nothing where the sync is made.
"""

import random
import shutil

import pytest
from crash_disk import CrashDisk
from durable_work import SCENARIOS
from sync_sites import all_sites

from penstock.errors import PenstockError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every scenario, with what its work does to the disk, made once."""
    found = {}
    for name, kind in SCENARIOS.items():
        scenario = kind(tmp_path_factory.mktemp("made"))
        with CrashDisk(scenario.fresh(tmp_path_factory.mktemp("dry") / "disk")) as disk:
            scenario.work(disk.root, lambda what: None)
        disk.lose()
        found[name] = scenario, disk.operations
    return found


class Trial:
    """One run of a scenario's work, killed and crashed at operations of one's choice."""

    def __init__(self, scenario, folder):
        self.scenario, self.folder = scenario, folder

    def keeps(self, killed_at, crash_at, seed, losing, deaf_to=None):
        """Return whether what was promised is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)
        root = self.scenario.fresh(self.folder)
        disk = CrashDisk(root, killed_at or crash_at, seed, deaf_to, losing)
        promised = []
        with disk:
            self._work(disk, promised)
            if killed_at:
                disk.go_on(crash_at)
                self._work(disk, promised)
        self.operations = disk.operations
        disk.lose()
        try:
            self.scenario.check(disk.root, promised)
        except (AssertionError, PenstockError, OSError):
            return False
        return True

    def _work(self, disk, promised):
        try:
            self.scenario.work(disk.root, promised.append)
        except (PenstockError, OSError):
            if not disk.crashed:
                raise


def crashes(chain, operations):
    """Yield where to crash so that a sync is missed, at the end or soon, and what is lost."""
    there = places(chain, operations)
    near = [place + later for place in there[:2] + there[2:][-1:] for later in (1, 2, 3, 5, 6)]
    for losing in ("all", "missed"):
        for at in [None, *(at for at in near if at <= len(operations))]:
            yield at, losing


def is_noticed(scenario, operations, chain, folder):
    """Whether some crash shows that a sync was left out, which costs nothing where it is made.

    Some syncs are there only for what a process has left that was killed before it synced, while
    the machine went on.
    """
    trial = Trial(scenario, folder)

    def shows(killed_at, at, losing):
        if trial.keeps(killed_at, at, 0, losing, deaf_to=chain):
            return False
        assert trial.keeps(killed_at, at, 0, losing), (killed_at, at, losing)
        return True

    if any(shows(None, *crash) for crash in crashes(chain, operations)):
        return True
    for killed_at in from_both_ends(first_syncs(operations)):
        trial.keeps(killed_at, None, 0, "missed", chain)
        second = trial.operations
        if chain in second and any(shows(killed_at, *crash) for crash in crashes(chain, second)):
            return True
    return False


def first_syncs(operations):
    """Return where each kind of sync is first, in order."""
    found = {what: at for at, what in reversed([*enumerate(operations, 1)]) if is_sync(what)}
    return sorted(found.values())


def from_both_ends(items):
    """Yield the first, the last, the second ...: what was made first or last is what is missed."""
    left = list(items)
    while left:
        yield left.pop(0)
        left.reverse()


def places(chain, operations):
    return [at for at, what in enumerate(operations, 1) if what == chain]


def is_sync(operation):
    return ": " in operation


def chains_of(made):
    found = {}
    for name, (_, operations) in made.items():
        for what in operations:
            if is_sync(what):
                found.setdefault(what, []).append(name)
    return found


@pytest.mark.long
def test_scenarios_cover_every_sync(made):
    seen = {site for chain in chains_of(made) for site in chain.split(" < ")}
    assert all_sites() == seen


@pytest.mark.long
def test_every_sync_is_necessary(made, tmp_path):
    unnoticed = []
    for chain, names in chains_of(made).items():
        if not any(is_noticed(*made[name], chain, tmp_path / "disk") for name in names):
            unnoticed.append(chain)
    assert unnoticed == []


@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("count", [4, pytest.param(400, marks=pytest.mark.slow)])
def test_crash_keeps_everything_promised(name, count, made, tmp_path):
    """At any operation, of one process, or of one that goes on where another was killed."""
    scenario, operations = made[name]
    trial, chosen = Trial(scenario, tmp_path / "disk"), random.Random(name)
    for seed in range(count):
        at = chosen.randrange(1, len(operations) + 2)
        killed_at = chosen.choice([None, chosen.randrange(1, len(operations) + 1)])
        crash = (killed_at, at, seed, "anything")
        assert trial.keeps(*crash), f"{name}: {crash}"
