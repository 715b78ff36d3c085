"""A run is planned for the machine that planning is given, not for the one that plans."""

import pytest

from penstock.config import Config
from penstock.errors import BudgetError
from penstock.kernels.processor import Processor
from penstock.planning import Machine, model_sources, plan_execution
from penstock.planning.machine_limits import DeviceMemory
from penstock.telemetry import process_memory

MIB = 1 << 20
MODEL = {"preset": "tiny", "n_positions": 32, "vocab_size": 64}
INTEL = Processor("x86_64", "GenuineIntel")


def config(**changes) -> Config:
    return Config.from_mapping(
        {"model": MODEL, "batch": {"size": 8}, "engine": {"device": "cpu"}, **changes}
    )


def planned(free, **changes):
    made = config(**changes)
    machine = Machine(INTEL, 4, 300 * MIB, free * MIB)
    asked = []

    def read(devices):
        asked.append(tuple(devices))
        return machine

    source = model_sources.model_source(made.model)
    plan = plan_execution(made, source, "cpu", 32, read_machine=read)
    return plan, asked


@pytest.mark.long
def test_planning_does_not_query_the_system(monkeypatch):
    def refuse(*_):
        raise AssertionError("the system was asked")

    for name in ("resident_bytes", "available_bytes", "is_measurable"):
        monkeypatch.setattr(process_memory, name, refuse)
    small, asked = planned(1000)
    assert asked[0] == ()  # before there is a program, of no device
    assert set(asked[1:]) == {("cpu",)}
    large, _ = planned(9000)
    assert large.shares.engine == pytest.approx(small.shares.engine + 4000 * MIB, rel=0.01)
    with pytest.raises(BudgetError, match=r"this machine has 320\.00 MiB for this process"):
        planned(20)


def test_device_memory_is_the_minimum_free_memory():
    devices = {"cuda:0": DeviceMemory(70, 80), "cuda:1": DeviceMemory(60, 80)}
    machine = Machine(INTEL, 4, 1, 2, devices=devices)
    assert machine.memory_bytes == 3
    assert machine.free_bytes(["cuda:0", "cuda:1"]) == 60
    assert machine.free_bytes(["cuda:0"]) == 70
    with pytest.raises(KeyError):
        machine.free_bytes(["cuda:2"])


def test_machine_is_read_with_the_named_devices():
    here = Machine.here(("cpu",))
    assert here.cores >= 1
    assert here.resident_bytes > 50 * MIB
    assert here.available_bytes > 0
    assert here.devices == {}  # the CPU has no memory of its own
