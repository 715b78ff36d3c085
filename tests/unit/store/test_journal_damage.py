"""Damage to a journal costs the records that it hits, and no others."""

import random
import shutil

import pytest
from sharded_stores import sharded_flash
from store_programs import flash_store, make_program, random_weights, train

from penstock.errors import CorruptionError
from penstock.store.flash import (
    FlashReader,
    Repaired,
    journal as journal_module,
    open_reader,
    recorded_extra,
    repair,
)
from penstock.store.flash.journal import SECTOR_BYTES, read_records, whole_records

PROGRAM = make_program([{"a": (40, 60), "frozen": (30,)}, {"b": (50, 9)}], frozen=("frozen",))
STEPS = 5


def opened(folder):
    return flash_store(PROGRAM, folder, keep_steps=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with steps 0 to 5 in its journal, of which 3 can be opened, and their weights."""
    folder = tmp_path_factory.mktemp("made") / "flash"
    store = opened(folder)
    store.load(random_weights(PROGRAM, 1).items())
    hashes = [store.content_hash()]
    for _ in range(STEPS):
        train(store, 1, seed=store.step)
        store.make_durable()
        hashes.append(store.content_hash())
    store.close()
    return folder, hashes


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained[0], tmp_path / "flash")


def lengths(journal):
    records = read_records(journal)[0]
    return [len(journal_module._spelled(n, record)) for n, record in enumerate(records)]


def damaged(journal, places):
    content = bytearray(journal.read_bytes())
    for place in places:
        content[place] ^= 16
    journal.write_bytes(content)


@pytest.mark.parametrize("seed", range(12))
def test_repair_finds_the_newest_intact_step_after_any_damage(trained, folder, seed):
    draw, journal = random.Random(seed), folder / "journal"
    sizes = lengths(journal)
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    # Record 0 says what the store is; record n + 1 is that of step n, of which 3 to 5 have extents.
    hit = draw.sample(range(1, STEPS + 2), k=draw.randint(1, 3))
    damaged(journal, [begins[number] + draw.randrange(sizes[number]) for number in hit])
    with pytest.raises(CorruptionError), FlashReader(folder):
        pass
    left = [step for step in (3, 4, 5) if step + 1 not in hit]
    before = journal.read_bytes()
    if not left:
        with pytest.raises(CorruptionError, match="no durable step is intact"):
            repair(folder)
        assert journal.read_bytes() == before
        return
    assert repair(folder).step == left[-1], f"seed {seed}, records {hit}"
    listed = left[-1:]
    while listed[0] - 1 in left:
        listed.insert(0, listed[0] - 1)
    with FlashReader(folder) as reader:
        assert reader.steps == listed
    store = opened(folder)
    assert store.step == left[-1]
    assert store.content_hash() == trained[1][left[-1]]
    store.close()


def test_kept_step_is_not_overwritten_while_listed(folder):
    sizes = lengths(folder / "journal")
    damaged(folder / "journal", [sum(sizes[:5])])  # step 4, between two that are whole
    assert repair(folder) == Repaired(step=5, discarded=(2, 3), damaged_journal=True)
    for _ in range(4):
        store = opened(folder)
        train(store, 1, seed=store.step)
        store.make_durable()
        store.close()
        with FlashReader(folder) as reader:
            for step in reader.steps:
                reader.verify(step)


def test_record_copied_behind_others_is_refused(folder):
    journal = folder / "journal"
    records = read_records(journal)[0]
    old = journal_module._spelled(2, records[2])
    journal.write_bytes(journal.read_bytes() + bytes([1]) * SECTOR_BYTES + old)
    with pytest.raises(CorruptionError):
        read_records(journal)
    assert whole_records(journal) == records


@pytest.mark.parametrize(
    ("hit", "stands_at"),
    [
        ({1: [5]}, 4),  # the newest step of one shard: the others go back to it
        ({1: [4]}, 5),  # one in the middle, the newest is whole in both
        ({0: [4], 1: [3]}, 5),
        ({0: [5], 1: [4]}, 3),
        ({0: [3, 5], 1: [4]}, 2),  # not listed any more, and its extents not yet used again
        ({0: [2, 3, 5], 1: [4]}, None),  # of no step with extents both shards' records are whole
    ],
)
def test_shards_roll_back_together_to_a_step_intact_in_all(tmp_path, hit, stands_at):
    """No shard goes back alone: opening is refused, and a repair takes all to one step."""
    program = make_program([{"a": (4 * 4096,), "b": (7,)}])
    folder = tmp_path / "flash"

    def opened():
        return sharded_flash(program, folder, 2, keep_steps=3)

    store, hashes = opened(), []
    store.load(random_weights(program, 1).items())
    for _ in range(STEPS):
        hashes.append(store.content_hash())
        train(store, 1, seed=1)
        store.make_durable()
    hashes.append(store.content_hash())
    store.close()
    for shard, steps in hit.items():
        journal = folder / f"shard-{shard}" / "journal"
        sizes = lengths(journal)
        damaged(journal, [sum(sizes[: step + 1]) + 40 for step in steps])  # record 0 is no step's
    journals = {path: path.read_bytes() for path in folder.rglob("journal")}
    for look in (opened, lambda: open_reader(folder), lambda: recorded_extra(folder)):
        with pytest.raises(CorruptionError, match=r"shard-[01]/journal: "):
            look()
    if stands_at is None:
        with pytest.raises(CorruptionError, match="no durable step is intact in all shards"):
            repair(folder)
        assert {path: path.read_bytes() for path in journals} == journals
        return
    assert repair(folder).step == stands_at
    with open_reader(folder) as reader:
        assert reader.newest == stands_at
        assert reader.content_hash(stands_at) == hashes[stands_at]
    store = opened()
    assert store.step == stands_at
    assert store.content_hash() == hashes[stands_at]
    train(store, STEPS - stands_at, seed=1)
    assert store.content_hash() == hashes[STEPS]
    store.close()


def test_journal_without_first_record_is_refused(folder):
    damaged(folder / "journal", [100])
    with pytest.raises(CorruptionError, match="header of record 0"):
        repair(folder)
