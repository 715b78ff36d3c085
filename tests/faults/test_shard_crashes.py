"""A store in shards on flash: a crash between two shards' journals costs no bit."""

import sys
from pathlib import Path

import pytest
import torch
import warm_start
from sharded_stores import sharded_flash
from store_programs import make_program, random_weights, train, training_store

from penstock.errors import CorruptionError
from penstock.io import failpoints
from penstock.store.flash import open_reader, recorded_extra
from penstock.store.flash.shards import durable_records

LAYERS = (
    {"embed": (300, 50), "frozen": (9000,)},
    {"0.weight": (100, 90), "0.bias": (90,)},
    {"norm": (16,), "embed": (300, 50)},
)
PROGRAM = make_program(LAYERS, frozen=("frozen",), stream_dtype=torch.bfloat16, narrow=("frozen",))
STEPS, SEED = 4, 7
KILLER = Path(__file__).with_name("shard_killer.py")

POINTS = [f"shards.{place}" for place in ("before_sync", "before_rename", "after_rename")]
POINTS += ["shards.after_sync"]
BETWEEN = [
    f"{point}:{visit}"
    for point, visits in (
        ("journal.before_seal", (1, 2, 5, 8)),  # before the first of two, or before the second
        ("journal.after_seal_sync", (3, 9)),
        ("journal.create.after_sync", (1,)),
    )
    for visit in visits
]
GOING_BACK = ["journal.drop.before_rename:1", "journal.drop.after_sync:1"]


def opened(folder):
    return sharded_flash(PROGRAM, folder, 2)


def run(store):
    """Load weights if it is new, and train to the last step, which is durable then."""
    if store.is_new:
        store.load(random_weights(PROGRAM, SEED).items())
    while store.step < STEPS:
        store.remember({"behind": store.step})
        train(store, 1, SEED)
    store.make_durable()


@pytest.fixture(scope="module")
def expected():
    """The hash of a run of one store, in memory."""
    store = training_store(PROGRAM, "bf16")
    store.load(random_weights(PROGRAM, SEED).items())
    train(store, STEPS, SEED)
    return store.content_hash()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder of runs that were killed, each at another place."""
    folder = tmp_path_factory.mktemp("killed")
    orders = [f"{place}/{place}" for place in [*(f"{p}:1" for p in POINTS), *BETWEEN]]
    for place in GOING_BACK:  # killed between the last step's seals, and again on the way back
        orders += [f"{place}/journal.after_seal_sync:{2 * STEPS + 1}", f"{place}/{place}"]
    child = warm_start.run(
        [sys.executable, str(KILLER), str(folder), *orders],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return folder


def steps_of(folder):
    return [
        [record.content["step"] for record in durable_records(folder / f"shard-{number}")]
        for number in range(2)
    ]


@pytest.mark.long
@pytest.mark.parametrize("place", [*(f"{p}:1" for p in POINTS), *BETWEEN, *GOING_BACK])
def test_kill_between_two_shards_does_not_change_bits(place, killed, expected):
    folder = killed / place
    held = steps_of(folder)
    newest = [steps[-1] if steps else -1 for steps in held]
    assert max(newest) - min(newest) <= 1
    recorded = recorded_extra(folder)
    store = opened(folder)
    if min(newest) < 0:
        assert store.is_new
        assert recorded is None
    else:
        assert store.step == min(newest)
        assert store.durable_step == store.step
        assert recorded == store.extra
        assert all(shard.extra == recorded for shard in store._on_flash)
        assert (
            recorded == {}
            if store.step == 0
            else recorded["behind"] in (store.step - 1, store.step)
        )
    run(store)
    assert store.content_hash() == expected
    store.close()
    with open_reader(folder) as reader:
        assert reader.newest == STEPS
        reader.verify(STEPS)
        assert reader.content_hash(STEPS) == expected


def test_some_kills_leave_shards_at_different_steps(tmp_path):
    """The first weights, and the last step, are sealed in one shard after the other."""
    apart = []
    store = opened(tmp_path / "flash")

    def watch(name):
        if name == "journal.after_seal_sync":
            newest = [steps[-1:] for steps in steps_of(tmp_path / "flash")]
            apart.append(newest[0] != newest[1])

    with failpoints.watching(watch):
        run(store)
    store.close()
    assert len(apart) == 2 * (STEPS + 1)
    assert apart[:2] == apart[-2:] == [True, False]


def test_shards_on_flash_without_common_step_are_refused(tmp_path):
    """A shard's folder from an older copy; nothing is changed on the way to the error."""
    folder = tmp_path / "flash"
    store = opened(folder)
    store.load(random_weights(PROGRAM, SEED).items())
    train(store, 1, SEED)
    store.make_durable()
    store._on_flash[0]._pipeline.drain()
    older = {f.name: f.read_bytes() for f in (folder / "shard-1").iterdir()}
    while store.step < STEPS:
        train(store, 1, SEED)
    store.make_durable()
    store.close()
    for name, content in older.items():
        (folder / "shard-1" / name).write_bytes(content)
    assert steps_of(folder) == [[3, 4], [0, 1]]
    message = "no durable step that all shards hold: shard-0 holds 3, 4; shard-1 holds 0, 1; rest"
    for look in (lambda: opened(folder), lambda: recorded_extra(folder)):
        with pytest.raises(CorruptionError, match=message):
            look()
    assert steps_of(folder) == [[3, 4], [0, 1]]


def test_damage_in_one_shard_rolls_all_back_to_common_step(tmp_path, expected):
    folder = tmp_path / "flash"
    store = opened(folder)
    run(store)
    shard = store._on_flash[1]
    unit = shard._layout.units[-1]
    place = unit.stream_offset(shard._version._place[unit.index])
    store.close()
    with (folder / "shard-1" / "extents").open("r+b") as file:
        file.seek(place)
        file.write(b"damaged")
    with open_reader(folder) as reader:
        assert reader.steps == [STEPS - 1, STEPS]
        reader.verify(STEPS - 1)
        with pytest.raises(CorruptionError, match="shard-1/extents: damaged in bytes"):
            reader.verify(STEPS)
        with pytest.raises(CorruptionError, match="shard-1/extents: damaged in bytes"):
            reader.content_hash(STEPS)
    with open_reader(folder, despite_damage=True) as reader:
        assert reader.repair() == STEPS - 1
        assert reader.steps == [STEPS - 1]
    store = opened(folder)
    assert store.step == STEPS - 1
    run(store)
    assert store.content_hash() == expected
    store.close()
