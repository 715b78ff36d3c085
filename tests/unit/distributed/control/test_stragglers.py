"""Who is called slow, and who is not."""

from penstock.distributed.control.worker_stats import (
    Straggler,
    StragglerDetector,
    StragglerReports,
)


def after(steps: int, seconds: dict[int, float], micro_batches: int = 4) -> dict:
    """What engines have computed after so many steps, each taking so long for a step."""
    return {e: (steps * s, steps * micro_batches) for e, s in seconds.items()}


def test_straggler_is_reported_until_it_recovers():
    watch = StragglerDetector(2.0)
    pace = {1: 2.0, 2: 2.2, 3: 5.0}
    assert watch.look(after(1, pace)) == []  # nothing to compare with yet
    for looks in (1, 2, 3):
        (slow,) = watch.look(after(1 + looks, pace))
        assert (slow.engine, slow.looks) == (3, looks)
        assert abs(slow.times - 5.0 / 2.2) < 1e-9
    computed = {e: (s + 2.0, n + 4) for e, (s, n) in after(4, pace).items()}
    assert watch.look(computed) == []
    (slow,) = watch.look({e: (s + (2.0, 9.0)[e == 3], n + 4) for e, (s, n) in computed.items()})
    assert slow.looks == 1  # it begins anew


def test_straggler_of_two_engines_is_found():
    watch = StragglerDetector(2.0)
    watch.look(after(1, {1: 2.0, 2: 5.0}))
    (slow,) = watch.look(after(2, {1: 2.0, 2: 5.0}))
    assert slow.engine == 2


def test_engine_with_more_micro_batches_is_not_slow():
    watch = StragglerDetector(2.0)
    for steps in (1, 2, 3):
        assert watch.look({1: (2.0 * steps, 2 * steps), 2: (6.0 * steps, 6 * steps)}) == []


def test_short_steps_are_compared_over_several_steps():
    watch = StragglerDetector(2.0)
    pace = {1: 0.3, 2: 0.9}
    found = [len(watch.look(after(steps, pace))) for steps in range(1, 9)]
    assert sum(found) == 1  # the fast one has computed a second after four steps more
    assert not any(found[:4])


def test_single_and_new_engines_are_not_slow():
    watch = StragglerDetector(2.0)
    assert watch.look(after(1, {1: 9.0})) == []
    assert watch.look(after(2, {1: 9.0})) == []
    assert watch.look({1: (27.0, 12), 2: (1.5, 1)}) == []


def test_state_of_lost_engines_is_dropped():
    watch = StragglerDetector(2.0)
    for slow in range(10, 60):  # each is slow for two steps, and another comes in its place
        pace = {1: 2.0, 2: 2.0, slow: 9.0}
        watch.look(after(2 * slow, pace))
        assert [found.looks for found in watch.look(after(2 * slow + 1, pace))] == [1]
    assert all(len(kept) <= 3 for kept in vars(watch).values() if isinstance(kept, dict))


def test_straggler_is_reported_again_after_ten_minutes_or_a_change_by_half():
    now = 0.0
    reports = StragglerReports(clock=lambda: now)
    due = []
    for at, engine, times in (
        (0, 1, 2.6),
        (10, 1, 2.4),
        (20, 1, 3.8),
        (30, 2, 3.8),
        (40, 1, 3.9),  # reported as changed
        (50, 1, 4.1),
        (639, 1, 2.7),
        (640, 1, 2.7),
        (650, 1, 1.8),
    ):
        now = float(at)
        if reports.is_due(Straggler(engine, times, 1)):
            due.append((at, engine))
    assert due == [(0, 1), (30, 2), (40, 1), (640, 1), (650, 1)]
