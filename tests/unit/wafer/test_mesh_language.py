"""The language of mesh programs: what a word does, and mistakes that are found and named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.errors import BudgetError, ConfigError, MeshError
from penstock.wafer import SILICON, CoreParameters, Mesh
from penstock.wafer.language import RECEIVE, SEND, MeshProgram
from penstock.wafer.mesh import Ticks, TraceOptions

PLAIN = CoreParameters("plain")  # 2 cycles for a task, none for a vector operation


def along_row(mesh: Mesh, core: CoreParameters = PLAIN, **options) -> tuple:
    """A program with a colour that goes along the first row to all of its cores."""
    p = MeshProgram(mesh, core, **options)
    colour = p.colour("words")
    p.route(colour, p.cores(0, slice(0, -1)), "west", ("east", "ramp"))
    p.route(colour, p.cores(0, -1), "west", "ramp")
    return p, colour


def text(program: MeshProgram, kind: type[Exception] = MeshError) -> str:
    with pytest.raises(kind) as error:
        program.run()
    return str(error.value)


# --- what a program does --------------------------------------------------------------------------


def test_word_starts_a_task_that_multiplies_and_adds():
    p, colour = along_row(Mesh(1, 3))
    x = p.array("x", (3, 8), np.arange(24).reshape(3, 8))
    y = p.array("y", 8)
    task = p.task(colour)
    task.axpy(y.all, x[task.index], task.value)
    p.feed(colour, 0, "west", np.array([1.0, 2.0, 3.0]), np.array([0, 2, 1]))
    run = p.run()
    expected = np.arange(8) + 2 * np.arange(16, 24) + 3 * np.arange(8, 16)
    assert (run.read(y) == expected).all()
    # The first word takes 1 hop and 2 up the ramp, each task 2 and 8 / 4 elements; two hops more.
    assert run.report.cycles == 1 + 2 + 3 * 4 + 2
    assert (run.report.busy == 12).all()
    assert (run.report.busy + run.report.starved + run.report.blocked == 17).all()
    assert run.report.words_entered == {"words": 3}
    assert run.report.words_delivered == {"words": 9}


def test_slow_core_holds_up_the_stream_through_full_queues():
    p, colour = along_row(Mesh(1, 4))
    p.task(colour, p.cores(0, slice(0, 3)), cycles=1)
    p.task(colour, p.cores(0, 3), cycles=10)
    p.feed(colour, 0, "west", np.zeros(100))
    report = p.run().report
    assert report.cycles == pytest.approx(1000, rel=0.02)
    assert report.greatest_depth == PLAIN.queue_words
    assert report.busy.tolist() == [[100, 100, 100, 1000]]


def test_words_of_a_colour_keep_their_order_through_every_core():
    mesh = Mesh(1, 5)
    p = MeshProgram(mesh, PLAIN, element_bytes=4)
    colour = p.colour("words")
    p.route(colour, p.cores(0, 0), "west", "ramp")
    p.route(colour, p.cores(), "ramp", "east")
    for column in range(1, 5):
        p.route(colour, p.cores(0, column), "west", "ramp")
    none = p.array("zeros", 50)
    p.main().receive_add_send(none.all, colour, colour)
    numbers = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    p.feed(colour, 0, "west", numbers)
    drain = p.drain(colour, 4, "east", 50)
    run = p.run()
    assert (run.drained(drain)[0] == numbers).all()


def test_two_colours_share_a_link_equally():
    mesh = Mesh(1, 2)
    p = MeshProgram(mesh, PLAIN, element_bytes=4)
    zeros = p.array("zeros", 64)
    for number, thread in enumerate((RECEIVE, SEND)):
        colour = p.colour(f"colour {number}")
        p.route(colour, p.cores(0, 0), "ramp", "east")
        p.route(colour, p.cores(0, 1), "west", "ramp")
        p.main(p.cores(0, 0), thread).send(zeros.all, colour)
        p.main(p.cores(0, 1), thread).receive(zeros.all, colour)
    report = p.run().report
    assert report.link_words[0, 0, 1] == 128
    assert report.cycles == pytest.approx(128 + 5, abs=3)


def test_fraction_of_a_cycle_per_word_is_honoured_exactly():
    slow = dataclasses.replace(PLAIN, word_cycles=1.125)
    assert Ticks.of(slow).per_cycle == 8
    p, colour = along_row(Mesh(1, 2), slow)
    p.task(colour, cycles=0.0)
    p.feed(colour, 0, "west", np.zeros(801))
    # 800 words of 1.125 cycles, and the way of the last.
    assert p.run().report.cycles == 800 * 1.125 + 1 + 1 + 2


def test_cycles_that_no_common_part_divides_are_refused():
    with pytest.raises(ConfigError) as error:
        MeshProgram(Mesh(1, 1), dataclasses.replace(PLAIN, hop_cycles=1.00001))
    assert str(error.value) == (
        "hop_cycles: expected cycles that together with those before it divide a cycle into at "
        "most 1000 equal parts, got 1.00001; round it, for example to a hundredth"
    )


def test_host_link_limits_the_words_of_all_streams_together():
    core = dataclasses.replace(PLAIN, host_bits_per_second=PLAIN.clock_hz * 32 * 2)  # 2 words/cycle
    p = MeshProgram(Mesh(8, 1), core)
    colour = p.colour("words")
    p.route(colour, p.cores(), "west", "ramp")
    p.task(colour, cycles=0.0)
    for row in range(8):
        p.feed(colour, row, "west", np.zeros(100))
    assert p.run().report.cycles == pytest.approx(8 * 100 / 2, abs=8)


def test_same_program_has_the_same_report_every_time():
    reports = []
    for _ in range(2):
        p, colour = along_row(Mesh(2, 5), SILICON)
        task = p.task(colour, p.cores(0))
        y = p.array("y", 6)
        task.fill(y.all, task.value)
        p.feed(colour, 0, "west", np.arange(30.0))
        reports.append(p.run(TraceOptions(20, 5)).report)
    first, second = reports
    assert first.cycles == second.cycles
    assert first.events == second.events
    assert (first.trace.states == second.trace.states).all()
    assert first.queues == second.queues


def test_trace_has_the_states_and_links_of_the_first_windows():
    p, colour = along_row(Mesh(1, 2))
    p.task(colour, cycles=5)
    p.feed(colour, 0, "west", np.zeros(20))
    report = p.run(TraceOptions(windows=4, cycles=10)).report
    trace = report.trace
    assert trace.states.shape == (4, 1, 2, 3)
    assert trace.states[:, 0, 0].sum(axis=-1).tolist() == [1, 1, 1, 1]
    assert trace.states[0, 0, 0].tolist() == [0.7, 0.3, 0.0]  # the first word comes at cycle 3
    assert trace.links[0, 0, 0, 1] >= 2
    assert trace.links.sum() < report.link_words.sum()


# --- mistakes -------------------------------------------------------------------------------------


def test_route_that_loops_is_named_with_core_and_colour():
    p = MeshProgram(Mesh(2, 2), PLAIN)
    colour = p.colour("round")
    p.route(colour, p.cores(0, 0), "south", "east")
    p.route(colour, p.cores(0, 1), "west", "south")
    p.route(colour, p.cores(1, 1), "north", "west")
    p.route(colour, p.cores(1, 0), "east", "north")
    assert text(p) == (
        "core (0, 0), colour 'round', before the first cycle: the route loops, over 4 links; end "
        "it at a core"
    )


def test_two_writers_of_a_colour_on_a_link_are_named():
    p = MeshProgram(Mesh(1, 3), PLAIN)
    colour = p.colour("sums")
    p.route(colour, p.cores(0, 1), "west", "east")
    with pytest.raises(MeshError) as error:
        p.route(colour, p.cores(0, 1), "ramp", ("east", "west"))
    assert str(error.value) == (
        "core (0, 1), colour 'sums', before the first cycle: two writers of the link to the east, "
        "words from west and from ramp; give one of them another colour"
    )


def joined_row(joins: tuple[bool, bool] = (True, True)) -> MeshProgram:
    """A row of three cores, whose words go east over the same links."""
    p = MeshProgram(Mesh(1, 3), PLAIN)
    colour = p.colour("sums")
    p.route(colour, p.cores(0, slice(0, 2)), "ramp", "east", joins=joins[0])
    p.route(colour, p.cores(0, 1), "west", "east", joins=joins[1])
    p.route(colour, p.cores(0, 2), "west", "ramp")
    return p


def test_routes_that_join_share_a_link_word_by_word():
    p = joined_row()
    colour, x = p.routes.colours[0], p.array("x", 30, element_bytes=4)
    p.load(x, p.cores(), np.repeat([[1.0], [2.0], [0.0]], 30, axis=1))
    p.main(p.cores(0, slice(0, 2))).send(x.all, colour, pack=1)
    total = p.array("total", 1, element_bytes=4)
    take = {"take": colour, "into": total.all, "adds": True, "is_ring": True, "pack": 1}
    p.main(p.cores(0, 2)).stream(60, **take)
    run = p.run()
    assert run.read(total)[2, 0] == 30 * 1 + 30 * 2
    assert run.report.link_words[0, 1, 1] == 60
    # One word per cycle on the link that they share, after a ramp, a hop and a ramp.
    assert run.report.cycles == 60 + 2 + 1 + 2


@pytest.mark.parametrize("joins", [(True, False), (False, True)])
def test_writer_of_a_link_that_does_not_join_is_named(joins):
    with pytest.raises(MeshError) as error:
        joined_row(joins)
    assert str(error.value) == (
        "core (0, 1), colour 'sums', before the first cycle: two writers of the link to the east, "
        "words from ramp and from west; give one of them another colour"
    )


def test_loop_that_other_routes_join_is_named():
    p = MeshProgram(Mesh(2, 3), PLAIN)
    colour = p.colour("round")
    p.route(colour, p.cores(0, 0), "west", "east")
    p.route(colour, p.cores(0, 1), "west", "south", joins=True)
    p.route(colour, p.cores(0, 1), "east", "south", joins=True)
    p.route(colour, p.cores(1, 1), "north", "east")
    p.route(colour, p.cores(1, 2), "west", "north")
    p.route(colour, p.cores(0, 2), "south", "west")
    assert text(p) == (
        "core (0, 1), colour 'round', before the first cycle: the route loops, over 4 links; end "
        "it at a core"
    )


def test_second_route_from_a_side_is_refused():
    p, colour = along_row(Mesh(1, 3))
    with pytest.raises(MeshError) as error:
        p.route(colour, p.cores(0, 1), "west", "north")
    assert str(error.value) == (
        "core (0, 1), colour 'words', before the first cycle: expected one route from west, got "
        "two; join their outputs"
    )


def test_word_that_no_route_takes_is_named_with_its_cycle():
    p = MeshProgram(Mesh(2, 3), PLAIN)
    colour = p.colour("lost")
    p.route(colour, p.cores(1, 0), "west", "east")
    p.feed(colour, 3, "west", np.zeros(2))
    assert text(p) == (
        "core (1, 1), colour 'lost', cycle 1: a word arrives from the west, where no route takes "
        "it; route the colour there or end the route of core (1, 0) before"
    )


def test_word_that_no_task_takes_is_named_with_its_cycle():
    p, colour = along_row(Mesh(1, 2))
    p.task(colour, p.cores(0, 0), cycles=1)
    p.feed(colour, 0, "west", np.zeros(2))
    assert text(p) == (
        "core (0, 1), colour 'words', cycle 2: a word goes to the core, which has no task and no "
        "receive for that colour; add one or take the ramp out of the route"
    )
    p, colour = along_row(Mesh(1, 2))
    p.task(colour, cycles=1)
    p.feed(colour, 0, "west", np.zeros(2), controls=np.array([False, True]))
    assert text(p) == (
        "core (0, 0), colour 'words', cycle 4: a control word arrives that no task takes; give the "
        "colour a control task or do not send such words"
    )


def test_deadlock_says_who_waits_for_what_since_when():
    p = MeshProgram(Mesh(1, 2), PLAIN, element_bytes=4)
    vector = p.array("vector", 16)
    for name, first, second in (("right", 0, 1), ("left", 1, 0)):
        colour = p.colour(name)
        p.route(colour, p.cores(0, first), "ramp", "east" if second else "west")
        p.route(colour, p.cores(0, second), "west" if second else "east", "ramp")
    right, left = p.routes.colours
    for core, (sends, takes) in enumerate(((right, left), (left, right))):
        code = p.main(p.cores(0, core))
        code.send(vector.all, sends)
        code.receive(vector.all, takes)
    # Both send 16 words before they receive one: 3 queues of 4 take 12 of them.
    assert text(p) == (
        "deadlock in cycle 12: nothing can move any more; core (0, 0) (compute) waits for room to "
        "send colour 'right' since cycle 12, core (0, 1) (compute) waits for room to send colour "
        "'left' since cycle 12, 4 words of colour 'right' wait at core (0, 0), 4 words of colour "
        "'right' wait at core (0, 1) and 4 more"
    )


def test_memory_that_a_core_lacks_is_named():
    p = MeshProgram(Mesh(2, 2), PLAIN)
    p.array("first", 20_000, cores=p.cores(1, 1))
    with pytest.raises(BudgetError) as error:
        p.array("second", 3_000)
    assert str(error.value) == (
        "core (1, 1): array 'second' needs 6,000 bytes beside 40,000 of other arrays; a core has "
        "44,976 for data; take a larger mesh or fewer tokens"
    )


def test_index_outside_an_array_is_named_with_core_and_cycle():
    p, colour = along_row(Mesh(1, 1))
    x, y = p.array("x", (3, 4)), p.array("y", 4)
    task = p.task(colour)
    task.axpy(y.all, x[task.index], task.value)
    p.feed(colour, 0, "west", np.ones(2), np.array([2, 3]))
    assert text(p) == (
        "core (0, 0), cycle 8: axpy of y begins at element 12, outside its array; check the index "
        "that the word carries"
    )
    with pytest.raises(MeshError) as error:
        x[3]
    assert str(error.value) == "x: expected an index from 0 to 2, got 3"


def test_route_off_the_mesh_needs_a_drain_of_the_right_size():
    p = MeshProgram(Mesh(1, 1), PLAIN)
    colour = p.colour("out")
    p.route(colour, p.cores(), "west", "east")
    assert text(p) == (
        "core (0, 0), colour 'out', before the first cycle: the route leaves the mesh to the east "
        "without a drain; add one or end the route"
    )
    p.feed(colour, 0, "west", np.zeros(3))
    p.drain(colour, 0, "east", 2)
    assert text(p) == (
        "core (0, 0), colour 'out', cycle 3: more words leave the mesh than the drain expects; "
        "correct its number of words"
    )


def test_drain_that_gets_fewer_words_is_a_deadlock():
    p = MeshProgram(Mesh(1, 1), PLAIN)
    colour = p.colour("out")
    p.route(colour, p.cores(), "west", "east")
    p.feed(colour, 0, "west", np.zeros(3))
    p.drain(colour, 0, "east", 5)
    assert text(p) == (
        "deadlock in cycle 4: nothing can move any more; drain 0 still expects 2 words"
    )


def test_colour_that_is_sent_without_a_route_is_named():
    p = MeshProgram(Mesh(1, 2), PLAIN)
    colour = p.colour("sums")
    p.route(colour, p.cores(0, 0), "ramp", "east")
    p.main().send(p.array("x", 4).all, colour)
    assert text(p) == (
        "core (0, 1), colour 'sums', before the first cycle: the core sends it, but no route takes "
        "it from the ramp"
    )


def test_two_threads_that_take_a_colour_are_refused():
    p, colour = along_row(Mesh(1, 1))
    p.task(colour)
    p.main(thread=RECEIVE).receive(p.array("x", 4).all, colour)
    assert text(p) == (
        "core (0, 0), colour 'words', before the first cycle: two threads take its words; let one "
        "of them do it"
    )


def test_loop_that_takes_no_time_and_never_ends_is_named():
    p = MeshProgram(Mesh(1, 1), PLAIN)
    register = p.register("turn")
    code = p.main()
    with code.loop(register, 10, cycles=0):
        code.set(register, 0)
    assert text(p) == (
        "core (0, 0), cycle 0: a task runs a million instructions without taking time, at "
        "register turn; its loop never ends"
    )


def test_program_that_runs_too_long_is_ended():
    p = MeshProgram(Mesh(1, 1), PLAIN)
    with (code := p.main()).loop(p.register("turn"), 10**6):
        code.work(10)
    with pytest.raises(MeshError) as error:
        p.run(most_cycles=1000)
    assert str(error.value) == (
        "cycle 1,001: the program is still running; give most_cycles a larger value"
    )


def test_more_colours_than_a_router_has_are_refused():
    p = MeshProgram(Mesh(1, 1), PLAIN)
    for number in range(24):
        p.colour(str(number))
    with pytest.raises(MeshError) as error:
        p.colour("one more")
    assert str(error.value) == "colours: expected at most 24, got one more, 'one more'"


def test_stream_enters_only_at_an_edge_and_sides_have_names():
    p, colour = along_row(Mesh(1, 3))
    with pytest.raises(MeshError) as error:
        p.feed(colour, 1, "west", np.zeros(1))
    assert str(error.value) == (
        "core (0, 1): expected an edge of the mesh to the west, got a core within it"
    )
    with pytest.raises(MeshError) as error:
        p.route(colour, p.cores(0, 0), "sout", "east")
    assert str(error.value) == (
        "side: expected north, east, south, west, ramp, got 'sout' (did you mean 'south'?)"
    )


def test_mesh_without_cores_is_refused():
    with pytest.raises(ConfigError) as error:
        MeshProgram(Mesh(0, 4), PLAIN)
    assert str(error.value) == (
        "mesh: expected rows from 1 up, got 0; a CS-2 has 750 rows and 994 columns, for example "
        "mesh: 750x994"
    )
