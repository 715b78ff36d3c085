"""A real measurement of this host, short, gives a valid description."""

from __future__ import annotations

import pytest
import torch

from penstock.calibration import HostKey, calibrate, keep, kept_machine
from penstock.machines import IN_FLOPS, MachineDescription
from penstock.machines.description import ENGINE_WORK, FLASH_WORK, STORE_WORK


@pytest.mark.long
@pytest.mark.timeout(1200)  # compiling the kernels, if none is yet
def test_a_short_measurement_describes_this_host(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "disk").mkdir()
    threads, told = torch.get_num_threads(), []
    machine = calibrate(1, tmp_path / "disk", lambda text, share: told.append((text, share)))
    assert torch.get_num_threads() == threads
    assert list((tmp_path / "disk").iterdir()) == []
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] <= 1
    assert MachineDescription.model_validate(machine.model_dump(mode="json")) == machine
    keep(machine, HostKey.here())
    assert kept_machine(HostKey.here()) == machine

    engine, store = machine.engine, machine.store
    assert (engine.is_host, machine.kind, machine.link) == (True, "host", None)
    assert {curve.work for curve in engine.rates} == set(ENGINE_WORK)
    assert {curve.work for curve in store.rates} == set(STORE_WORK)
    assert store.flash is not None
    assert {curve.work for curve in store.flash.rates} == set(FLASH_WORK)
    for curve in (*engine.rates, *store.rates, *store.flash.rates):
        # Outside of these, the amount of work is counted wrongly, whatever the machine.
        assert (1e6 if curve.work in IN_FLOPS else 1e5) < min(curve.rates), curve
        assert max(curve.rates) < 1e15, curve
        assert curve.spread >= 0
    assert 0 < engine.operator_seconds < engine.stage_seconds < 1
    assert "fewer than 3 of some work: 1 s were too short" in machine.sources["rates"]
