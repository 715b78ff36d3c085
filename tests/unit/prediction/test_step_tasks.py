"""Steps as tasks, against sums and pipelines that can be computed by hand."""

import itertools

import pytest

from penstock.machines import MachineDescription
from penstock.prediction.operation_times import OperationCost, StepCosts
from penstock.prediction.step_tasks import Arrangement, StepTasks
from penstock.prediction.task_simulation import simulate
from penstock.step_schedule import Operation, sweep_order
from penstock.store.flash.forecast import FlashForecast, UnitUpdate, WeightRead

STAGES = 4
ORDER = sweep_order(STAGES)  # 3 forward, turn, 3 backward
COMPUTE, UPDATE, RECEIVE = 2.0, 0.25, 0.5
WEIGHTS = GRADIENTS = 1000


def costs(compute=COMPUTE):
    operations = []
    for number, (stage, sweep) in enumerate(ORDER):
        returns = sweep != "forward"
        operation = Operation(number, stage, sweep, (), (), ("w",) if returns else (), 0, 0)
        operations.append(
            OperationCost(
                operation,
                compute,
                0,
                WEIGHTS,
                GRADIENTS if returns else 0,
                RECEIVE if returns else 0.0,
                () if sweep == "backward" else (f"w{stage}",),
            )
        )
    return StepCosts(tuple(operations), {f"w{stage}": UPDATE for stage in range(STAGES)})


def machine(link=None, flash=None, checksum=None, processes=None):
    engine = {"rates": [rate("product"), rate("pointwise")]}
    engine |= {"is_host": True} if link is None else {"memory": "40GB"}
    store = {"memory": "24GiB", "rates": [rate("update")]}
    if flash is not None:
        store["flash"] = {"rates": [rate("flash read", flash), rate("flash write", flash)]}
    if checksum is not None:
        store["rates"].append(rate("checksum", checksum))
    parts = {"engine": engine, "store": store, "link": link, "processes": processes}
    return MachineDescription.model_validate({"name": "m", "kind": "host", **parts})


def rate(work, value=1e12):
    return {"work": work, "rates": [value]}


def step_seconds(described, step=None, flash=None, engines=1, **more):
    tasks = StepTasks(step or costs(), Arrangement(described, engines, **more), flash).build(6)
    ends = [span.end for span in simulate(tasks) if span.what == "commit"]
    return ends[-1] - ends[-2]


def link(weights, gradients=1e12):
    return {"weights": weights, "gradients": gradients}


def test_one_thread_does_one_thing_after_the_other():
    operations, returned = len(ORDER), STAGES
    expected = operations * COMPUTE + STAGES * UPDATE + returned * RECEIVE
    assert step_seconds(machine()) == pytest.approx(expected)


def test_engines_of_one_process_take_turns():
    added = step_seconds(machine(), engines=3) - step_seconds(machine())
    assert added == pytest.approx(2 * len(ORDER) * COMPUTE)


def test_fast_link_hides_everything_but_the_first_update_and_the_last_gradient():
    found = step_seconds(machine(link(1e12)))
    assert found == pytest.approx(len(ORDER) * COMPUTE + UPDATE + RECEIVE, rel=1e-6)


def test_slow_link_binds_the_step():
    seconds = 5.0  # per operation, against 2 of computing
    found = step_seconds(machine(link(WEIGHTS / seconds)))
    assert found == pytest.approx(len(ORDER) * seconds + UPDATE + COMPUTE + RECEIVE, rel=1e-6)


def test_store_without_a_fabric_sends_to_each_engine():
    shared = {**link(1e12), "store": WEIGHTS / 1.0}
    alone, four = (step_seconds(machine(shared), engines=count) for count in (1, 4))
    assert four > alone
    broadcast = {**shared, "fan_out": 4}
    assert step_seconds(machine(broadcast), engines=4, depth=1) == pytest.approx(alone)


@pytest.mark.parametrize("weights", [100.0, 500.0, 2000.0, 1e9])
def test_faster_link_is_never_slower(weights):
    assert step_seconds(machine(link(2 * weights))) <= step_seconds(machine(link(weights))) + 1e-9


def traffic(state=0, weights=0):
    updates = tuple(
        UnitUpdate(stage, state, 0, state, 0, (f"w{stage}",)) for stage in range(STAGES)
    )
    reads = tuple(WeightRead(n, max(0, n - 1), weights) for n in range(len(ORDER)) if weights)
    return FlashForecast(reads, updates, 4000, {}, 0)


def test_disk_that_is_fast_enough_costs_nothing():
    without = step_seconds(machine(), costs())
    found = step_seconds(machine(flash=1e12), costs(), traffic(1000, 1000))
    assert found <= without + 1e-6


def test_disk_binds_when_the_state_takes_longer_than_the_step():
    size = 100_000
    found = step_seconds(machine(flash=1000.0), costs(0.01), traffic(size))
    assert found >= STAGES * size / 1000.0  # each way; reads and writes overlap


def test_slower_disk_is_never_faster():
    times = [
        step_seconds(machine(flash=speed), costs(), traffic(2000, 1000))
        for speed in (100.0, 1000.0, 10_000.0, 1e6)
    ]
    assert all(later <= time + 1e-9 for time, later in itertools.pairwise(times))


def test_checksums_of_flash_take_time_of_the_updater_and_of_the_reader():
    size, speed = 1000, 1000.0
    bound = step_seconds(machine(flash=1e12, checksum=speed), costs(0.0), traffic(size))
    # Each state is verified when it arrives, and has a new checksum when it goes.
    assert bound == pytest.approx(STAGES * (2 * size / speed + UPDATE + RECEIVE), rel=0.3)
    times = [
        step_seconds(machine(flash=1e12, checksum=rate), costs(0.01), traffic(0, size))
        for rate in (1e12, 1e3)
    ]
    assert times[1] >= len(ORDER) * size / 1e3
    assert times[0] < times[1]


def messages(shared, socket, **more):
    rates = [rate("shared memory", shared), rate("socket", socket)]
    return {"rates": rates, **more}


def of_processes(part, engines=2, compute=0.001, **more):
    given = {"shares_cores": True, **more}
    return step_seconds(machine(processes=part), costs(compute), engines=engines, **given)


def test_engines_in_processes_wait_for_their_messages():
    slow = of_processes(messages(WEIGHTS / 5.0, 1e12))
    assert slow >= 2 * len(ORDER) * 5.0  # 5 s per operation and engine
    assert of_processes(messages(WEIGHTS / 5.0, 1e12), messages="socket") < slow
    late = of_processes(messages(1e12, 1e12, seconds=3.0))
    assert late >= 2 * len(ORDER) * 3.0


def test_messages_both_ways_share_what_the_host_can_carry():
    part = WEIGHTS / 5.0
    alone = of_processes(messages(part, 1e12))
    assert of_processes(messages(part, 1e12, both=part)) > alone
    assert of_processes(messages(part, 1e12, both=2 * part)) == pytest.approx(alone)


def test_engines_that_compute_at_once_take_as_much_longer_as_was_measured():
    def seconds(engines, **more):
        return of_processes(messages(1e12, 1e12, **more), engines, compute=100.0)

    longer = seconds(2, at_once=1.5) - seconds(2)
    assert longer == pytest.approx(0.5 * 2 * 100.0 * len(ORDER), rel=0.01)
    assert seconds(1, at_once=1.5) == seconds(1)


@pytest.mark.parametrize(("threads", "is_longer"), [(None, True), (2, True), (1, False)])
def test_engines_with_cores_of_their_own_take_no_longer(threads, is_longer):
    described = machine(processes=messages(1e12, 1e12, at_once=1.5))
    store = described.store.model_copy(update={"cores": 2})
    arrangement = Arrangement(
        described.model_copy(update={"store": store}),
        engines=2,
        shares_cores=True,
        threads=threads,
    )
    assert arrangement.at_once == (1.5 if is_longer else 1.0)


def test_processes_without_a_measurement_send_as_fast_as_the_store_copies():
    engine = {"is_host": True, "rates": [rate("product"), rate("pointwise")]}
    store = {"memory": "24GiB", "rates": [rate("update"), rate("copy", WEIGHTS / 5.0)]}
    described = MachineDescription.model_validate(
        {"name": "m", "kind": "host", "engine": engine, "store": store}
    )
    found = step_seconds(described, costs(0.001), engines=2, shares_cores=True)
    assert found >= 2 * len(ORDER) * 5.0
