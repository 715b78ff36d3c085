"""Repetitions within a budget: their order, their number, their median and their spread."""

from __future__ import annotations

import pytest

from penstock.calibration.repetitions import (
    Case,
    Measured,
    Prepared,
    Quantity,
    measure,
    repetition_counts,
)
from penstock.errors import ClusterError


class Machine:
    """Work on a clock of its own: a call takes the seconds of its case, and is recorded."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self.slower: dict[int, float] = {}  # factor on the n-th call

    def clock(self) -> float:
        return self.now

    def case(self, name, seconds, amount=100.0, most=None, preparing=0.0):
        def run() -> None:
            self.now += seconds * self.slower.get(len(self.calls), 1.0)
            self.calls.append(name)

        def prepare() -> Prepared:
            self.now += preparing
            return Prepared(run, amount, size=7.0)

        return Case(Quantity("engine", name), prepare, most)

    def measure(self, *cases, budget):
        return measure(cases, budget, clock=self.clock)


def test_everything_is_measured_once_before_anything_is_repeated():
    machine = Machine()
    machine.measure(machine.case("a", 1), machine.case("b", 2), machine.case("c", 1), budget=12)
    warm_up_and_first = ["a", "a", "b", "b", "c", "c"]
    assert machine.calls == [*warm_up_and_first, "a", "b", "c", "a", "b", "c"]


def test_budget_below_one_round_measures_everything_once():
    machine = Machine()
    found = machine.measure(machine.case("a", 1), machine.case("b", 2), budget=0.5)
    assert [len(one.rates) for one in found] == [1, 1]
    assert repetition_counts(found) == (1, 1)


def test_repetitions_stop_before_the_budget_is_exceeded():
    for budget in (5, 7.5, 20, 33):
        machine = Machine()
        found = machine.measure(machine.case("a", 1), machine.case("b", 3), budget=budget)
        counts = [len(one.rates) for one in found]
        warm_ups = 1 + 3
        assert machine.now - warm_ups == counts[0] * 1 + counts[1] * 3
        # Warm-ups count once both have enough repetitions.
        used = machine.now if counts[1] >= 3 else machine.now - warm_ups
        assert used <= budget
        # One more of the next in turn would exceed it.
        following = 3 if counts[0] > counts[1] else 1
        assert used + following > budget
        assert counts[0] - counts[1] in (0, 1)


@pytest.mark.parametrize("calls", [0, 1, 2, 5])
def test_failure_of_another_process_leaves_the_figures_of_other_parts(calls):
    machine, lost = Machine(), []

    def fail_after(calls: int):
        def run() -> None:
            nonlocal calls
            calls -= 1
            machine.now += 1
            if calls < 0:
                raise ClusterError("the other process has ended")

        return run

    def links(name, run):
        return Case(Quantity("processes", name), lambda: Prepared(run, 1.0))

    failing = fail_after(calls)
    found = measure(
        [machine.case("a", 1), links("x", failing), machine.case("b", 1), links("y", failing)],
        20,
        clock=machine.clock,
        on_lost=lambda part, error: lost.append((part, str(error))),
    )
    assert [one.quantity.work for one in found] == ["a", "b"]
    assert min(repetition_counts(found)) >= 3
    assert lost == [("processes", "the other process has ended")]


def test_failure_of_another_process_is_raised_unless_asked_otherwise():
    def fail() -> None:
        raise ClusterError("the other process has ended")

    case = Case(Quantity("processes", "x"), lambda: Prepared(fail, 1.0))
    with pytest.raises(ClusterError, match="the other process has ended"):
        measure([case], 1)


def test_preparation_counts_once_there_are_enough_repetitions():
    machine = Machine()
    found = machine.measure(machine.case("a", 1, preparing=1000), budget=30)
    assert len(found[0].rates) == 3
    machine = Machine()
    found = machine.measure(machine.case("a", 1, preparing=20), budget=30)
    assert len(found[0].rates) == 9  # after 20 s and a warm-up
    assert machine.now == 30


def test_short_calls_are_repeated_within_a_repetition():
    machine = Machine()
    (found,) = machine.measure(machine.case("a", 1e-5, amount=50, most=4), budget=1)
    assert len(found.rates) == 4
    assert len(machine.calls) >= 4 * 200
    assert found.rate == pytest.approx(50 / 1e-5)


def test_most_limits_the_repetitions_of_its_case_alone():
    machine = Machine()
    found = machine.measure(machine.case("a", 1, most=2), machine.case("b", 1), budget=10)
    assert [len(one.rates) for one in found] == [2, 6]
    assert machine.now == 10


def test_measurement_ends_when_no_case_may_be_repeated():
    machine = Machine()
    found = machine.measure(machine.case("a", 1, most=2), budget=1e9)
    assert [len(one.rates) for one in found] == [2]


def test_rate_is_the_amount_over_the_seconds():
    machine = Machine()
    (found,) = machine.measure(machine.case("a", 0.5, amount=100, most=3), budget=100)
    assert found.rates == (200.0,) * 3
    assert (found.rate, found.spread, found.size) == (200.0, 0.0, 7.0)


def test_a_disturbance_spoils_one_repetition_of_each_case_and_no_median():
    machine = Machine()
    cases = [machine.case(name, 1, most=3) for name in "abc"]
    # Calls 0 to 5 are the warm-ups and the first repetitions, 6 to 8 the second ones.
    machine.slower = {6: 10.0, 7: 10.0, 8: 10.0}
    found = machine.measure(*cases, budget=1000)
    assert [one.rate for one in found] == [100.0] * 3
    assert [one.spread for one in found] == [pytest.approx((100 - 10) / 2 / 100)] * 3


def test_spread_is_half_the_range_over_the_median():
    measured = Measured(Quantity("engine", "product"), 1.0, (8.0, 10.0, 16.0, 9.0, 11.0))
    assert measured.rate == 10.0
    assert measured.spread == pytest.approx((16 - 8) / 2 / 10)


def test_progress_only_grows_and_names_the_work():
    said = []
    machine = Machine()
    cases = [machine.case(name, 1) for name in "abc"]
    measure(
        cases,
        9,
        clock=machine.clock,
        on_progress=lambda text, share: said.append((text, share)),
    )
    shares = [share for _, share in said]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    assert [text for text, _ in said[:4]] == [
        "measuring a",
        "measuring b",
        "measuring c",
        "repeating a",
    ]


def test_failing_work_ends_the_measurement():
    def fail() -> Prepared:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure([Case(Quantity("engine", "a"), fail)], 1)
