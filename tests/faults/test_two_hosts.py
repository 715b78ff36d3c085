"""A run over two hosts whose cable is cut and put back: it goes on, to the same bits, encrypted."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hosts import network_of
from packet_capture import Capture
from stepped_run import SteppedRun
from test_cluster_processes import alone, settings, text

__all__ = ["network_of", "text"]


@pytest.mark.slow  # 40 s of processor time: every process of the two hosts imports everything
def test_cut_cable_does_not_change_bits(text, network_of, tmp_path):
    network = network_of(2)
    here = network.hosts[0]
    config = settings(
        text,
        tmp_path / "run",
        engines=2,
        cluster={"start": "listen", "host": here.address, "stall": 2.0},
    )
    # What every beat says, and what a worker is told when it joins.
    capture = Capture(network.switch, '{"progress": ', '"learning_rate"')
    run = SteppedRun(config, tmp_path, here)
    try:
        run.until("happened", "listening")
        command = [sys.executable, "-m", "penstock.cluster.worker"]
        for host in network.hosts:
            record = str(tmp_path / "run" / "cluster.json")
            host.start(*command, record, stderr=subprocess.DEVNULL)
        for _ in range(2):
            run.step()
        assert run.count("joined") == 2, run.happened
        assert {place["host"] for place in run.places()} == {h.address for h in network.hosts}
        network.plug(1, there=False)
        cut = run.step()  # the lease ends, and the engine on this side goes on alone
        assert 0.5 < cut["seconds"] < 10.0
        assert any("silent for" in line for line in run.happened)
        run.step()
        network.plug(1, there=True)
        run.step_until(lambda: run.count("joined") >= 3)  # it will notice, and come by itself
        for _ in range(2):
            run.step()
        weights = run.end()
        passed, found = capture.end()
        assert passed > 1 << 20
        assert found == {'{"progress": ': 0, '"learning_rate"': 0}
    finally:
        run.close()
    assert (run.losses, weights) == alone(text, tmp_path / "alone", len(run.losses))
