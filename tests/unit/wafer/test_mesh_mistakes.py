"""Mistakes of a mesh program that would otherwise give wrong results without a word."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.errors import ConfigError, MeshError
from penstock.wafer import CoreParameters, Mesh
from penstock.wafer.language import RECEIVE, MeshProgram
from penstock.wafer.mesh import TraceOptions

PLAIN = CoreParameters("plain")


def program(rows: int = 1, columns: int = 2, **options) -> MeshProgram:
    return MeshProgram(Mesh(rows, columns), PLAIN, **options)


def refused(action, *arguments, **options) -> str:
    with pytest.raises(MeshError) as error:
        action(*arguments, **options)
    return str(error.value)


def test_second_code_of_a_thread_is_refused():
    p = program()
    p.main().work(1)
    p.main(p.cores(0, 1)).work(1)
    assert refused(p.run) == (
        "core (0, 1), before the first cycle: two codes with which its thread 'compute' begins; "
        "write one after the other in one code"
    )


def test_second_task_for_the_same_words_is_refused():
    p = program()
    words = p.colour("words")
    p.route(words, p.cores(), "north", "ramp")
    p.task(words)
    p.task(words, kind="control")
    p.task(words, p.cores(0, 1))
    assert refused(p.run) == (
        "core (0, 1), colour 'words', before the first cycle: two tasks for its data words; join "
        "them"
    )


def test_task_that_no_word_can_start_is_refused():
    p = program()
    words = p.colour("words")
    p.route(words, p.cores(0, 0), "west", "ramp")
    p.task(words)
    assert refused(p.run) == (
        "core (0, 1), colour 'words', before the first cycle: the core has a task for it, but no "
        "route takes it to the core; add the ramp to the route"
    )


def test_two_streams_of_a_colour_at_one_place_are_refused():
    p = program()
    words = p.colour("words")
    p.route(words, p.cores(0, 0), "west", "ramp")
    p.feed(words, 0, "west", np.zeros(9))
    assert refused(p.feed, words, 0, "west", np.zeros(9)) == (
        "core (0, 0), colour 'words', before the first cycle: two streams enter from the west; "
        "join their words or give one another colour"
    )


def test_drains_of_a_colour_are_one_per_place_and_not_negative():
    p = program()
    words = p.colour("words")
    p.drain(words, 1, "east", 3)
    assert refused(p.drain, words, 1, "east", 3) == (
        "core (0, 1), colour 'words', before the first cycle: two drains to the east; let one take "
        "all words"
    )
    assert refused(p.drain, words, 0, "west", -1) == (
        "core (0, 0), colour 'words', before the first cycle: expected a drain of 0 words or more, "
        "got -1"
    )


def test_words_have_two_numbers_and_a_kind_each():
    p = program()
    words = p.colour("words")
    p.route(words, p.cores(0, 0), "west", "ramp")
    assert refused(p.feed, words, 0, "west", np.zeros(3), np.zeros(1)) == (
        "core (0, 0), colour 'words': expected a first and a second number and a kind for each "
        "word, got the shapes [[3], [1], [3]]"
    )


def test_array_is_used_only_on_cores_that_have_it():
    p = program()
    here, there = p.array("here", 4, cores=p.cores(0, 0)), p.array("there", 4)
    p.main().add(there.all, there.all, here.all)
    assert refused(p.run) == (
        "core (0, 1), before the first cycle: add of there needs 'here', which is not on that "
        "core; place the array there or the code elsewhere"
    )
    assert refused(p.load, here, p.cores(), np.ones(4)) == (
        "core (0, 1): array 'here' gets values there, but is not on that core; place it there too"
    )


def test_parts_of_another_program_are_refused():
    other = program()
    for name in "abc":
        other.register(name)
        other.counter(name)
    far = other.array("far", 2000)
    for write in (
        lambda code: code.set(other.register("d"), 0),
        lambda code: code.post(other.counter("d")),
        lambda code: code.fill(far.all),
    ):
        p = program()
        write(p.main())
        assert refused(p.run).endswith(
            ": a register, counter or array in it belongs to another program; make it with the "
            "program that runs"
        )


def test_cores_beyond_the_mesh_are_refused():
    p = program(2, 3)
    words = p.colour("words")
    assert refused(p.route, words, [6], "west", "ramp") == (
        "core: expected a number from 0 to 5 on a mesh of 2x3, got 6"
    )
    assert refused(p.cores, 2) == "row: expected a number from 0 to 1 on a mesh of 2x3, got 2"
    assert refused(p.cores, None, 3) == (
        "column: expected a number from 0 to 2 on a mesh of 2x3, got 3"
    )
    assert refused(p.feed, words, -1, "west", np.zeros(1)) == (
        "core: expected a number from 0 to 5 on a mesh of 2x3, got -1"
    )


def test_parts_that_do_not_fill_words_are_refused():
    p = program()
    words, odd = p.colour("words"), p.array("odd", 5)
    assert refused(p.main().send, odd.all, words) == (
        "odd: expected elements that fill words of 2, got 5; add zeros (`program.padded`)"
    )
    wide = p.array("wide", 4, element_bytes=4)
    assert refused(p.main().send, wide.all, words) == (
        "wide: expected elements of 16 bits, two in a word, got elements of 32 bits; pass pack=1"
    )


def test_stream_with_a_third_gate_is_refused():
    p = program()
    gates = tuple(p.counter(str(number)) for number in range(3))
    assert refused(p.main().stream, 4, gates=gates) == (
        "stream: expected at most 2 gates and 2 signals, got 3 and 0"
    )


def test_operands_of_one_element_have_one():
    p = program()
    x = p.array("x", 4)
    assert refused(p.main().axpy, x.all, x.all, x.all) == (
        "axpy of x: expected one element of x, got 4"
    )
    assert refused(p.main().dot, x.all, x.all, x.all) == (
        "dot of x: expected one element of x, got 4"
    )
    assert refused(p.main().cells, "sum", x[0], x[1]) == (
        "cells: expected add, subtract, multiply, divide, root, got 'sum'"
    )


def test_loops_turn_at_least_once():
    p = program()
    with pytest.raises(MeshError) as error, p.main().loop(p.register("turn"), 0):
        pass
    assert str(error.value) == "loop over turn: expected 1 turn or more, got 0"


def test_numbers_beyond_32_bits_are_refused():
    p = program()
    assert refused(p.register, "far", 1 << 31) == (
        "register 'far': expected numbers of 32 bits, got 2,147,483,648 to 2,147,483,648"
    )
    p.main().set(p.register("near"), 1 << 40)
    assert refused(p.run) == "register near: expected a number of 32 bits, got 1099511627776"


@pytest.mark.parametrize("cycles", [-1.0, 1e9, float("inf")])
def test_instruction_takes_a_bounded_number_of_cycles(cycles):
    p = program()
    p.main().work(cycles)
    assert refused(p.run) == (
        f"work: expected from 0 to 16,777,215 cycles, got {cycles:,.10g}; divide the work"
    )


def test_run_that_would_overflow_the_clock_is_ended():
    p = program(1, 1)
    with (code := p.main()).loop(p.register("turn"), 1000):
        code.work(16_777_215)
    assert refused(p.run) == (
        "cycle 2,097,151,875: the program is still running; a run has at most 2,080,374,784 "
        "cycles of 1 ticks"
    )


def test_tables_beyond_32_bit_places_are_refused():
    p = program(600, 600)
    p.array("memory", 11_000, element_bytes=4)
    text = refused(p.run)
    assert text.startswith("simulation: expected tables of at most 8,589,934,588 bytes, got 15,")
    assert text.endswith("take a smaller mesh or a shorter trace, or the closed form")


def test_slow_host_link_is_refused_where_it_would_overflow():
    p = MeshProgram(Mesh(1, 1), dataclasses.replace(PLAIN, host_bits_per_second=1.0))
    assert refused(p.run) == (
        "plain cores: expected at most 16,777,216 cycles for a word on a link or between wafer and "
        "host, got 35,200,000,000"
    )


def test_threads_that_wake_each_other_without_time_are_ended():
    p = program(1, 1)
    there, back = p.counter("there"), p.counter("back")
    for thread, (sends, takes) in enumerate(((there, back), (back, there))):
        code = p.main(thread=thread)
        with code.loop(p.register("turn"), 10**9, cycles=0):
            code.post(sends)
            code.wait(takes)
    assert refused(p.run) == (
        "core (0, 0), cycle 0: threads wake each other without taking time, again and again; let "
        "one of their instructions take a cycle"
    )


@pytest.mark.parametrize("index", [np.nan, np.inf, -1.0, 3e9, 2.0**32, 2.0**40])
def test_index_that_is_no_place_of_an_array_is_refused(index):
    p = program(1, 1)
    words = p.colour("words")
    p.route(words, p.cores(), "west", "ramp")
    x, y = p.array("x", (3, 4)), p.array("y", 4)
    task = p.task(words)
    task.axpy(y.all, x[task.index], task.value)
    p.feed(words, 0, "west", np.ones(1), np.array([index]))
    text = refused(p.run)
    assert text.startswith("core (0, 0), cycle 5: axpy of y begins at element -")
    assert text.endswith(", outside its array; check the index that the word carries")


def test_values_that_are_no_numbers_pass_unchanged():
    p = program(1, 1, element_bytes=4)
    words = p.colour("words")
    p.route(words, p.cores(), "west", "ramp")
    x = p.array("x", 4)
    p.main(thread=RECEIVE).receive(x.all, words)
    given = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    p.feed(words, 0, "west", given)
    assert np.array_equal(p.run().read(x)[0], given, equal_nan=True)


def test_filling_with_a_number_rounds_it_as_other_operations_do():
    p = program(1, 1)
    x = p.array("x", 2)
    p.main().fill(x.all, 0.1)
    assert p.run().read(x)[0].tolist() == [float(np.float16(0.1))] * 2


def test_route_that_loops_beyond_a_core_names_the_loop_alone():
    p = program(2, 4)
    words = p.colour("words")
    for core, arrives, leaves in (
        (1, "south", "east"),
        (2, "west", ("south", "east")),
        (6, "north", "west"),
        (5, "east", "north"),
        (3, "west", "ramp"),
    ):
        p.route(words, [core], arrives, leaves)
    assert refused(p.run) == (
        "core (0, 1), colour 'words', before the first cycle: the route loops, over 4 links; end "
        "it at a core"
    )


def test_trace_has_windows_of_cycles():
    with pytest.raises(ConfigError) as error:
        TraceOptions(windows=4, cycles=0)
    assert str(error.value) == "trace: expected cycles from 1 up, got 0"


def test_program_with_nothing_in_it_takes_no_time():
    for mesh in (Mesh(1, 1), Mesh(3, 5)):
        report = MeshProgram(mesh, PLAIN).run().report
        assert report.cycles == 0
        assert report.hops == 0
        assert report.busy_share == 0
