"""What shares a resource of the simulated mesh takes turns: edges, ramps, host links, tasks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from penstock.wafer import CoreParameters, Mesh
from penstock.wafer.language import SEND, MeshProgram
from penstock.wafer.mesh import TraceOptions

PLAIN = CoreParameters("plain")
LENGTHS = st.tuples(st.integers(1, 60), st.integers(1, 60))
WORDS = st.sampled_from([1.0, 1.125, 2.0])


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, word_cycles=WORDS)
def test_edge_that_two_streams_share_carries_one_word_at_a_time(lengths, word_cycles):
    p = MeshProgram(Mesh(1, 1), dataclasses.replace(PLAIN, word_cycles=word_cycles))
    for side, length in zip(("east", "south"), lengths, strict=True):
        colour = p.colour(side)
        p.route(colour, p.cores(), "west", side)
        p.drain(colour, 0, side, length)
        p.feed(colour, 0, "west", np.zeros(length), from_host=False)
    assert p.run().report.cycles >= (sum(lengths) - 1) * word_cycles


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, word_cycles=WORDS)
def test_ramp_that_two_threads_share_carries_one_word_at_a_time(lengths, word_cycles):
    core = dataclasses.replace(PLAIN, word_cycles=word_cycles, threads_share_data_path=False)
    p = MeshProgram(Mesh(1, 1), core, element_bytes=4)
    for thread, (side, length) in enumerate(zip(("east", "west"), lengths, strict=True)):
        colour, x = p.colour(side), p.array(side, length)
        p.route(colour, p.cores(), "ramp", side)
        p.drain(colour, 0, side, length)
        p.main(thread=SEND * thread).send(x.all, colour)
    report = p.run().report
    assert report.words_delivered == {"east": lengths[0], "west": lengths[1]}
    assert report.cycles >= (sum(lengths) - 1) * word_cycles


@pytest.mark.parametrize("each", [2.0, 3.5])
@pytest.mark.parametrize("to_host", [True, False])
def test_host_link_limits_the_words_that_leave_by_all_drains_together(each, to_host):
    core = dataclasses.replace(PLAIN, host_bits_per_second=32 * PLAIN.clock_hz / each)
    p = MeshProgram(Mesh(2, 1), core)
    colour = p.colour("words")
    p.route(colour, p.cores(), "west", "east")
    for place in (0, 1):
        p.feed(colour, place, "west", np.zeros(50), from_host=False)
        p.drain(colour, place, "east", 50, to_host=to_host)
    cycles = p.run().report.cycles
    if to_host:
        assert 99 * each <= cycles <= 100 * each + 10
    else:
        assert cycles <= 60


@pytest.mark.parametrize("delay", [1, 2, 3, 4])
def test_word_for_two_links_is_not_passed_by_words_for_one_of_them(delay):
    """Without a claim on links that are free, no tick comes in which both are."""
    p = MeshProgram(Mesh(1, 2), dataclasses.replace(PLAIN, word_cycles=2.0), element_bytes=4)
    both, east, south = (p.colour(name) for name in ("both", "east", "south"))
    p.route(both, p.cores(0, 0), "west", ("east", "south"))
    p.route(both, p.cores(0, 1), "west", "east")
    p.route(east, p.cores(0, 0), "north", "east")
    p.route(east, p.cores(0, 1), "west", "south")
    p.route(south, p.cores(0, 0), "ramp", "south")
    p.feed(both, 0, "west", np.zeros(20), from_host=False)
    p.feed(east, 0, "north", np.zeros(100), from_host=False)
    code, x = p.main(p.cores(0, 0)), p.array("x", 100)
    code.work(delay)  # with one of the delays its words come between those to the east
    code.send(x.all, south)
    for colour, core, side, words in (
        (both, 0, "south", 20),
        (both, 1, "east", 20),
        (east, 1, "south", 100),
        (south, 0, "south", 100),
    ):
        p.drain(colour, core, side, words)
    trace = p.run(TraceOptions(windows=10, cycles=20)).report.trace
    assert trace is not None
    # A link has 10 words in a window, which its two streams share till the 20 words have passed.
    assert trace.links[:4, 0, 1, 1].sum() >= 12


def test_core_that_waits_for_room_to_send_is_blocked():
    p = MeshProgram(Mesh(1, 2), PLAIN, element_bytes=4)
    colour, x = p.colour("words"), p.array("x", 100)
    p.route(colour, p.cores(0, 0), "ramp", "east")
    p.route(colour, p.cores(0, 1), "west", "ramp")
    p.main(p.cores(0, 0)).send(x.all, colour)
    p.task(colour, p.cores(0, 1), cycles=10)
    report = p.run().report
    assert report.cycles == pytest.approx(1000, rel=0.02)
    # A word takes a cycle of the first core and ten of the second; queues hold some.
    assert report.busy[0].tolist() == [100, 1000]
    assert report.blocked[0, 0] == pytest.approx(900, rel=0.2)
    assert report.blocked[0, 1] == 0


def test_tasks_of_two_colours_take_turns():
    p = MeshProgram(Mesh(1, 1), PLAIN, element_bytes=4)
    order, place = p.array("order", (60, 1)), p.register("place")
    for number, side in enumerate(("west", "north")):
        colour = p.colour(side)
        p.route(colour, p.cores(), side, "ramp")
        task = p.task(colour)
        task.fill(order[place], task.value)
        task.advance(place)
        p.feed(colour, 0, side, np.full(30, number + 1.0), from_host=False)
    found = p.run().read(order)[0, :, 0]
    assert sorted(found) == [1.0] * 30 + [2.0] * 30
    assert (found[:58:2] != found[1:59:2]).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("exponent", [-14, -3, 0, 9])
def test_sums_between_two_16_bit_numbers_are_rounded_to_the_even_one(sign, exponent):
    p = MeshProgram(Mesh(1, 1), PLAIN)
    # All numbers of 16 bits between two powers of two, and half of the distance between them.
    numbers = sign * np.ldexp(1 + np.arange(1024) / 1024, exponent).astype(np.float32)
    half = np.full(1024, sign * np.ldexp(1.0, exponent - 11), np.float32)
    x, total = p.array("x", 1024, numbers), p.array("total", 1024)
    y = p.array("y", 1024, half, element_bytes=4)
    p.main().add(total.all, x.all, y.all)
    found = p.run().read(total)[0]
    assert (found == (numbers + half).astype(np.float16).astype(np.float32)).all()


@pytest.mark.parametrize("long", [0, 1])
def test_events_far_apart_come_in_their_order(long):
    p = MeshProgram(Mesh(1, 2), PLAIN)
    p.main(p.cores(0, long)).work(1_000_000)
    other = p.main(p.cores(0, 1 - long))
    for cycles in (300_000, 200_000, 100_000):
        other.work(cycles)
    report = p.run().report
    assert report.cycles == 1_000_000
    assert report.busy[0, 1 - long] == 600_000
