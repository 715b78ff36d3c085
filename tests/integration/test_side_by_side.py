"""Loops of a benchmark take turns: who steps when, who stands still, and when one fails."""

import dataclasses
import importlib
import time
from pathlib import Path

import pytest
from waiting import wait_until

from penstock.distributed.launchers.local import thread_states

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORKER = f"""
import json, os, sys, threading, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from side_by_side import serve

job = json.loads(sys.argv[2])
steps = 0

def beat():  # what a loop may do in the background
    while True:
        with open(job["beats"], "a") as file:
            file.write(".")
        time.sleep(0.005)

def step():
    global steps
    if steps == job["dies_after"]:
        os._exit(3)
    steps += 1
    with open(job["log"], "a") as file:
        file.write(job["name"])
    time.sleep(0.02 * job["slowness"])
    print("{{\\"seconds\\": 99}}")  # libraries print what they like
    return float(steps)

threading.Thread(target=beat, daemon=True).start()
serve(step)
"""


@dataclasses.dataclass(frozen=True)
class Job:
    name: str
    log: str
    beats: str
    slowness: int = 1
    dies_after: int | None = None


@pytest.fixture
def side_by_side(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("side_by_side")


@pytest.fixture
def start(tmp_path, side_by_side):
    (tmp_path / "worker.py").write_text(WORKER)
    workers = []

    def start(name, **job):
        plan = Job(name, str(tmp_path / "log"), str(tmp_path / f"beats-{name}"), **job)
        workers.append(side_by_side.Worker(plan, str(tmp_path / "worker.py")))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()


def test_every_second_round_is_reversed_and_warm_up_is_not_counted(tmp_path, side_by_side, start):
    workers = {"a": start("a", slowness=1), "b": start("b", slowness=5)}
    seconds = side_by_side.take_turns(workers, 3, warm_up=2)
    assert (tmp_path / "log").read_text() == "aabb" + "ab" + "ba" + "ab"
    assert [len(seconds[name]) for name in "ab"] == [3, 3]
    # What the step itself took, whatever a loop prints; a busy machine takes longer.
    assert all(0.02 <= s != 99 for s in seconds["a"])
    assert all(0.1 <= s != 99 for s in seconds["b"])
    assert workers["a"].losses == [1.0, 2.0, 3.0, 4.0, 5.0]
    found = side_by_side.summarize(workers, {"a": [1.0, 2.0, 9.0], "b": [4.0] * 3}, tokens=100)
    assert found["loss"] == {"a": 5.0, "b": 5.0}
    assert found["tokens_per_second"] == {"a": 50.0, "b": 25.0}
    assert 0 < found["peak_rss_gib"]["a"] < 1


def test_worker_is_stopped_while_it_is_not_its_turn(tmp_path, side_by_side, start):
    workers = {"a": start("a")}
    side_by_side.take_turns(workers, 1, warm_up=0)
    wait_until(lambda: set(thread_states(workers["a"].pid)) == {"T"}, "the signal has arrived")
    beats = tmp_path / "beats-a"
    before = beats.read_text()
    time.sleep(0.2)
    assert beats.read_text() == before
    wait_until(lambda: workers["a"].step() and beats.read_text() != before)


def test_early_end_of_one_worker_stops_all(side_by_side, start):
    workers = {"a": start("a"), "b": start("b", dies_after=3)}
    with pytest.raises(side_by_side.WorkerEnded, match="exit code 3"):
        side_by_side.take_turns(workers, 5, warm_up=2)
    assert all(worker.exit_code is not None for worker in workers.values())


def test_a_ratio_is_of_the_same_round(side_by_side):
    # A machine that is ten times slower in the second round slows both loops.
    seconds = {"a": [1.0, 10.0, 1.0], "b": [2.0, 20.0, 2.0]}
    assert side_by_side.median_ratio(seconds["b"], seconds["a"]) == 2.0
    assert side_by_side.speeds_over(seconds, "a") == {"a": 1.0, "b": 2.0}


def test_losses_within_rounding_give_their_greatest_difference(side_by_side):
    losses = {"penstock": [8.5, 8.25], "plain": [8.5, 8.2505], "compiled": [8.5001, 8.25]}
    assert side_by_side.check_losses(losses, "fp32") == pytest.approx(0.0005)


@pytest.mark.parametrize("wrong", [8.26, float("nan")])
def test_loss_that_rounding_does_not_explain_ends_the_benchmark(side_by_side, wrong):
    losses = {"penstock": [8.5, 8.25], "compiled": [8.5, 8.25], "plain": [8.5, wrong]}
    with pytest.raises(SystemExit, match=r"plain and penstock in fp32 .* at most 0\.001"):
        side_by_side.check_losses(losses, "fp32")
