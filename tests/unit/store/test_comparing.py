"""Two stores that hold the same say so after every step; one whose bit has flipped does not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from store_programs import (
    LAYERS,
    flash_store,
    forward_sweep,
    make_program,
    random_gradients,
    random_weights,
    send,
    training_store,
)

from penstock.distributed.rpc.commit_codec import ShardReport
from penstock.distributed.worker.shard_executor import LocalShardExecutor
from penstock.step_schedule import StepSchedule
from penstock.store import AdamW, comparing

PROGRAM = make_program(LAYERS, frozen=("position",), stream_dtype=torch.bfloat16)
SCHEDULES = StepSchedule.by_step(PROGRAM)
STAGE_OF = {name: n for n, layer in reversed([*enumerate(LAYERS)]) for name in layer}
EIGHT_BIT = AdamW(0.9, 0.95, 1e-8, moments="8bit")


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(comparing, "_PIECE_BYTES", 1_000)  # several of the larger weights


def in_memory(folder=None, optimizer=None):
    return training_store(PROGRAM, "bf16", optimizer=optimizer)


class Shard:
    """One of two nodes of a shard. The one that streams fetches all, the other none."""

    def __init__(self, store, streams: bool) -> None:
        self.store, self.streams = store, streams
        store.load(random_weights(PROGRAM, 0).items())
        self.generator = np.random.default_rng(3)
        place = type("Place", (), {"store": store})
        self.work = LocalShardExecutor(place, 0, SCHEDULES, has_replica=True)

    def step(self) -> ShardReport:
        """Make a step; return what is said of it before it is decided."""
        if self.streams:
            forward_sweep(self.store)
        else:
            self.work.settle()
        send(self.store, random_gradients(PROGRAM, self.generator))
        said = self.work.prepare()
        self.store.commit()
        return ShardReport.read(said)


def found_within(steps: int, ours: Shard, theirs: Shard) -> str | None:
    """What two nodes are found to differ in, in so many steps."""
    for _ in range(steps):
        difference = ours.step().difference(theirs.step())
        if difference is not None:
            return difference
    return None


@pytest.mark.parametrize("optimizer", [None, EIGHT_BIT], ids=["float32", "8 bits"])
def test_equal_replicas_in_memory_agree_for_more_than_one_rotation(optimizer):
    ours, theirs = (Shard(in_memory(optimizer=optimizer), streams) for streams in (True, False))
    said = [ours.step() for _ in range(80)]
    assert all(a.difference(theirs.step()) is None for a in said)
    turn = ours.store._rotation.steps
    assert turn < 70
    parts = [tuple(what for what, _ in report.held) for report in said]
    assert parts[:10] == parts[turn : turn + 10]
    assert all(parts)  # after every step something is compared


@pytest.mark.parametrize("name", [n for n, spec in PROGRAM.weights.items() if spec.elements])
@pytest.mark.parametrize("of", ["weights", "optimizer's state"])
def test_flipped_bit_of_weight_or_state_is_found_within_one_rotation(name, of):
    chance = np.random.default_rng(5)
    ours, theirs = (Shard(in_memory(), streams) for streams in (True, False))
    for _ in range(chance.integers(1, 4)):
        assert ours.step().difference(theirs.step()) is None
    theirs.store.flush()
    arrays = [*theirs.store._memory.masters.weight(name)]
    if of == "optimizer's state":
        arrays = [*theirs.store._memory.state.arrays(name).values()]
    for array in arrays[-1:]:  # what does not stream; none of a frozen weight's state
        element = array.view(np.uint8).reshape(array.size, -1)[chance.integers(array.size)]
        element[-1] ^= np.uint8(2)  # far from the last place, so that no rounding undoes it
        what = found_within(theirs.store._rotation.steps + 1, ours, theirs)
        # What is wrong with the state is soon wrong with the weights too.
        assert what is not None
        assert what.endswith(f"of stage stage{STAGE_OF[name]}")
    if not arrays:
        assert name == "position"


def test_rotation_compares_every_byte_once_in_parts_of_similar_size():
    sizes = [0, 10, 999, 1_000, 1_001, 50_000, 7, 120_500]
    slabs = [np.full(size, n, np.uint8) for n, size in enumerate(sizes)]
    rotation = comparing.Rotation((str(n), slab) for n, slab in enumerate(slabs))
    assert rotation.steps == comparing.ROTATION
    before = [dict(rotation.part(step)) for step in range(rotation.steps)]
    for n, slab in enumerate(slabs):
        for place in {0, slab.size // 2, slab.size - 1} if slab.size else ():
            slab[place] ^= 1
            changed = [
                (step, what)
                for step in range(rotation.steps)
                for what, found in rotation.part(step + rotation.steps)
                if before[step][what] != found
            ]
            assert [what for _, what in changed] == [str(n)]
            slab[place] ^= 1
    counts = [len(list(part)) for part in before]
    assert max(counts) <= 4


@pytest.mark.parametrize("durable_every", [1, 3])
@pytest.mark.usefixtures("speculated")
def test_replicas_on_flash_agree_and_a_flipped_bit_is_found_one_step_later(tmp_path, durable_every):
    stores = [
        flash_store(PROGRAM, tmp_path / str(n), dram_bytes=2_000_000, durable_every=durable_every)
        for n in range(2)
    ]
    try:
        ours, theirs = (Shard(store, n == 0) for n, store in enumerate(stores))
        for _ in range(7):
            assert ours.step().difference(theirs.step()) is None
        theirs.store._content.settle()
        held = theirs.store._pipeline._state._held
        assert held  # some state stays in memory between steps
        next(iter(held.values())).view(np.uint8)[100] ^= np.uint8(4)
        # The first update that uses it is that of the next step, which is compared one later.
        what = found_within(2, ours, theirs)
        assert what is not None
        assert what.startswith("the weights or the state of ")
    finally:
        for store in stores:
            store.close()


def test_shard_without_replica_reports_only_its_gradients():
    shard = Shard(in_memory(), streams=True)
    shard.work = LocalShardExecutor(type("Place", (), {"store": shard.store}), 0, SCHEDULES)
    assert shard.step().held == ()


def test_different_gradients_are_reported_first():
    ours, theirs = (Shard(in_memory(), streams) for streams in (True, False))
    theirs.generator = np.random.default_rng(4)
    assert ours.step().difference(theirs.step()) == "the gradients of the step"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_equal_non_finite_gradients_agree(value):
    """So that the run ends with what is wrong with them, and not with a faulty host."""
    nodes = [Shard(in_memory(), streams) for streams in (True, False)]
    reports = []
    for node in nodes:
        gradients = random_gradients(PROGRAM, node.generator)
        gradients[1][0].view(-1)[3] = value
        send(node.store, gradients)
        reports.append(ShardReport.read(node.work.prepare()))
    assert reports[0].gradients.non_finite == {1: ("block.0.weight",)}
    assert reports[0].difference(reports[1]) is None


def test_reports_of_different_lengths_differ():
    one = Shard(in_memory(), streams=True).step()
    for shorter, longer in itertools.permutations((one, ShardReport(one.gradients)), 2):
        assert shorter.difference(longer) == one.held[0][0]
