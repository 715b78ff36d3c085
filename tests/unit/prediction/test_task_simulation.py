"""The event model against schedules that can be computed by hand."""

import itertools
import random

import pytest

from penstock.prediction.task_simulation import Task, simulate


def ends(tasks):
    return [span.end for span in simulate(tasks)]


def test_lane_does_its_tasks_one_after_the_other():
    assert ends([Task("a", "x", 1.0), Task("a", "y", 2.0)]) == [1.0, 3.0]


def test_lanes_without_a_shared_resource_run_at_once():
    assert ends([Task("a", "x", 1.0), Task("b", "y", 2.0)]) == [1.0, 2.0]


def test_task_starts_after_the_tasks_that_it_needs():
    spans = simulate([Task("a", "x", 3.0), Task("b", "y", 1.0), Task("b", "z", 1.0, (0, 1))])
    assert (spans[2].begin, spans[2].end) == (3.0, 4.0)


def test_pipeline_of_three_lanes_is_bound_by_its_slowest_lane():
    tasks = []
    for item in range(10):
        first = len(tasks)
        tasks.append(Task("weights", "load", 1.0))
        tasks.append(Task("engine", "compute", 3.0, (first,)))
        tasks.append(Task("gradients", "send", 2.0, (first + 1,)))
        assert item == first // 3
    assert max(ends(tasks)) == pytest.approx(1.0 + 10 * 3.0 + 2.0)


def test_tasks_that_ask_for_more_than_a_resource_has_are_slowed_in_proportion():
    whole = {"cores": 1.0}
    assert ends([Task("a", "x", 1.0, uses=whole), Task("b", "y", 2.0, uses=whole)]) == [2.0, 3.0]


def test_tasks_within_the_capacity_of_a_resource_do_not_slow_each_other():
    half = {"cores": 0.5}
    assert ends([Task("a", "x", 1.0, uses=half), Task("b", "y", 1.0, uses=half)]) == [1.0, 1.0]


def test_task_of_no_duration_ends_when_it_starts():
    assert ends([Task("a", "x", 2.0), Task("b", "y", 0.0, (0,)), Task("b", "z", 1.0, (1,))]) == [
        2.0,
        2.0,
        3.0,
    ]


@pytest.mark.parametrize("after", [(1,), (2,)])
def test_task_that_waits_for_itself_or_a_later_task_is_refused(after):
    with pytest.raises(ValueError, match=f"task 1 waits for task {after[0]}"):
        simulate([Task("a", "x", 1.0), Task("a", "y", 1.0, after), Task("a", "z", 1.0)])


@pytest.mark.parametrize("seed", range(20))
def test_random_tasks_keep_the_rules_of_lanes_and_order(seed):
    draw = random.Random(seed)
    tasks = []
    for number in range(60):
        after = tuple(draw.sample(range(number), min(number, draw.randrange(3))))
        uses = {"cores": draw.choice([0.5, 1.0])} if draw.random() < 0.5 else {}
        tasks.append(Task(draw.choice("abcd"), "x", draw.choice([0.0, 0.5, 1.0]), after, uses))
    spans = simulate(tasks)
    for task, span in zip(tasks, spans, strict=True):
        assert span.seconds >= task.seconds - 1e-9
        assert all(spans[earlier].end <= span.begin + 1e-9 for earlier in task.after)
    for lane in "abcd":
        own = [span for span in spans if span.lane == lane]
        assert all(a.end <= b.begin + 1e-9 for a, b in itertools.pairwise(own))
    shared = sum(t.seconds * t.uses.get("cores", 0) for t in tasks)
    assert max(span.end for span in spans) >= shared - 1e-9  # no resource gives more than it has
