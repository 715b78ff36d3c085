"""Several measurements of one machine as one description."""

from __future__ import annotations

from measured_host import host

from penstock.machines import MachineDescription, median_machine


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


def test_everything_else_is_of_the_last_measurement():
    found = median_machine([host("before"), host("now")])
    assert found.name == "now"
