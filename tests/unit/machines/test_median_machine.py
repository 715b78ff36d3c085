"""Several measurements of one machine as one description."""

from __future__ import annotations

from measured_host import host

from penstock.machines import FLASH_DEVICE, MachineDescription, median_machine


def changed(**figures) -> MachineDescription:
    """Return the host with other figures of its engine."""
    whole = host().model_dump()
    return MachineDescription.model_validate({**whole, "engine": {**whole["engine"], **figures}})


def rate(machine: MachineDescription) -> float:
    return machine.engine.speed.curve("pointwise").at(1)


def test_one_measurement_is_itself():
    assert median_machine([host()]) == host()


def test_each_figure_is_the_median():
    machines = [host(rate=1e9), host(rate=5e9), host(rate=2e9)]
    found = median_machine(machines)
    assert rate(found) == 2e9
    curve = found.engine.speed.curve("pointwise")
    assert curve.spread == 1.0  # from 1 to 5, around 2
    assert found.engine.speed.curve("product").spread == 0.031  # within each measurement
    seconds = [changed(operator_seconds=value) for value in (1e-6, 9e-6, 2e-6)]
    assert median_machine(seconds).engine.operator_seconds == 2e-6


def test_curves_of_other_sizes_and_missing_parts_do_not_count():
    whole = host(rate=4e9).model_dump()
    whole["engine"]["rates"][3]["sizes"] = (1.0,)
    whole["store"]["flash"] = None
    other = MachineDescription.model_validate(whole)
    found = median_machine([other, host(rate=1e9)])
    assert rate(found) == 1e9
    assert found.store.flash == host().store.flash
    assert median_machine([host(rate=1e9), other]).store.flash is None


def with_disk(rate: float | None, device: str | None, operators: float = 1e9):
    """Return the host with a disk of a rate; None: without a disk."""
    whole = host(rate=operators).model_dump()
    if rate is None:
        whole["store"]["flash"] = None
    else:
        whole["store"]["flash"]["both"] = rate
        for curve in whole["store"]["flash"]["rates"]:
            curve["rates"] = (rate,)
    if device is not None:
        whole["sources"][FLASH_DEVICE] = device
    return MachineDescription.model_validate(whole)


def disk_rates(machine: MachineDescription) -> set[float | None]:
    flash = machine.store.flash
    return {flash.both, *(curve.rates[0] for curve in flash.rates)}


def test_rates_of_other_disks_do_not_count():
    fast, slow = "file system nvme", "file system hdd"
    measured = [with_disk(3e9, fast), with_disk(1e8, slow), with_disk(5e9, fast, 3e9)]
    assert disk_rates(median_machine(measured[:2])) == {1e8}
    found = median_machine(measured)
    assert disk_rates(found) == {4e9}
    assert found.store.flash.rates[0].spread == 0.25  # from 3 to 5, around 4
    assert rate(found) == 1e9  # of all three: operators do not depend on the disk


def test_disk_measured_before_devices_were_recorded_does_not_count_beside_one_with_a_device():
    before = [with_disk(3e9, None), with_disk(1e9, None)]
    assert disk_rates(median_machine(before)) == {2e9}
    assert disk_rates(median_machine([*before, with_disk(1e8, "/dev/sda1")])) == {1e8}
    without = with_disk(None, "/dev/sda1")
    assert disk_rates(median_machine([without, with_disk(1e8, "/dev/sda1")])) == {1e8}


def test_everything_else_is_of_the_last_measurement():
    found = median_machine([host("before"), host("now")])
    assert found.name == "now"
