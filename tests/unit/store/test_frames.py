"""Which weights a flash store evicts: reads ahead cost no more reads than reads at need."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings, strategies as st

from penstock.store.flash.frames import Frames, Visit, least_bytes

STEPS = 6


def no_memory(size):
    return np.broadcast_to(np.zeros(1, np.uint8), (size,))


def frames_of(sizes, stages, spare):
    """Frames for stages with units of these sizes, visited forward and backward; `spare` bytes
    more than the minimum."""
    units = [SimpleNamespace(stream_bytes=size, planned=0) for size in sizes]
    for unit in units:
        unit.expected = unit
    order = [*range(len(stages)), *reversed(range(len(stages)))]
    visits = [Visit(stage, sorted(stages[stage])) for stage in order]
    return Frames(units, visits, least_bytes(units, visits) + spare, no_memory), visits


def reads_of(frames, visits, ahead):
    """The units that are read in some steps, in order.

    `ahead` says how many may be read early after each visit.
    """
    in_use, read = [set(), set()], []
    for _ in range(STEPS):
        for visit in visits:
            frames.visit(visit.stage)
            in_use = [in_use[-1], set(visit.units)]
            pinned = set().union(*in_use)
            for unit in visit.units:
                if unit not in frames:
                    assert frames.make_room(unit, pinned, ahead=False)
                    read.append(unit)
            for _ in range(ahead()):
                unit = next((u for u in frames.upcoming() if u not in frames), None)
                if unit is None or not frames.make_room(unit, pinned, ahead=True):
                    break
                read.append(unit)
            assert all(unit in frames for unit in visit.units)
    return read


@st.composite
def programs(draw):
    count = draw(st.integers(2, 9))
    sizes = draw(st.lists(st.integers(1, 6), min_size=count, max_size=2 * count))
    stages = [set() for _ in range(count)]
    for unit in range(len(sizes)):
        stages[unit % count].add(unit)
    if draw(st.booleans()):  # a tied weight is used at both ends
        stages[-1].add(0)
    return sizes, stages, draw(st.integers(0, sum(sizes)))


@settings(max_examples=300, deadline=None)
@given(program=programs(), choices=st.randoms(use_true_random=False))
def test_disk_that_gets_ahead_reads_what_a_slow_disk_reads(program, choices):
    at_need = reads_of(*frames_of(*program), lambda: 0)
    far_ahead = reads_of(*frames_of(*program), lambda: 100)
    sometimes = reads_of(*frames_of(*program), lambda: choices.choice([0, 1, 2, 100]))
    for read in (far_ahead, sometimes):
        assert read[: len(at_need)] == at_need
        assert len(read) <= len(at_need) + len(program[0])  # those of the next step


def test_unit_waits_for_the_frame_that_it_would_get_at_its_visit():
    # Four stages of one unit, memory for three: the turn at the end is behind stage 3.
    frames, _ = frames_of([1, 1, 1, 1], [{0}, {1}, {2}, {3}], spare=1)
    for stage in range(3):
        frames.visit(stage)
        assert frames.make_room(stage, (), ahead=False)
    # Stage 0 is the last one to be needed again.
    assert frames.make_room(3, {1, 2}, ahead=True)
    assert [unit in frames for unit in range(4)] == [False, True, True, True]
    # For stage 0, in the backward sweep, that is stage 3, which the turn needs before.
    assert not frames.make_room(0, (), ahead=True)
    frames.visit(3)
    frames.visit(3)
    assert not frames.make_room(0, {3}, ahead=True)
    frames.visit(2)
    assert frames.make_room(0, {2}, ahead=True)
    assert [unit in frames for unit in range(4)] == [True, True, True, False]


def test_unit_waits_for_a_frame_that_is_being_written_and_evicts_no_other():
    frames, _ = frames_of([1, 1, 1, 1], [{0}, {1}, {2}, {3}], spare=1)
    for stage in range(3):
        frames.visit(stage)
        assert frames.make_room(stage, (), ahead=False)
    assert not frames.make_room(3, {1, 2}, ahead=True, unwritten={0})
    assert not frames.make_room(3, {2}, ahead=False, unwritten={0})
    assert not frames.make_room(3, {1}, ahead=True, kept={0})
    assert frames.make_room(3, (), ahead=True, kept={0})
    assert 0 in frames


def test_next_visit_is_counted_after_others():
    frames, _ = frames_of([1, 1, 1], [{0}, {1}, {2}], spare=0)  # visits 0 1 2 2 1 0
    assert [frames.next_use(1, after) for after in range(7)] == [1, 1, 4, 4, 4, 7, 7]
    frames.visit(0)
    assert [frames.next_use(0, after) for after in range(6)] == [4, 4, 4, 4, 4, 5]
