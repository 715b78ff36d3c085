"""A run over two hosts whose cable is cut and put back, or slow: the same bits, encrypted."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from hosts import network_of
from packet_capture import Capture
from stepped_run import SteppedRun
from test_cluster_processes import MODEL, alone, settings, text

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


@pytest.mark.slow  # 40 s, for the same reason
def test_weights_that_arrive_longer_than_the_stall_are_waited_for(text, network_of, tmp_path):
    """A weight of 590 kB takes 2.4 s on a link of 2 Mbit/s; a step without progress has 1 s."""
    if shutil.which("tc") is None:
        pytest.skip("the `tc` command is not there")
    network = network_of(2)
    here, there = network.hosts
    model = {"preset": "gpt2", "overrides": {**MODEL, "n_layer": 1, "n_embd": 192}}
    config = settings(
        text,
        tmp_path / "run",
        model=model,
        engines=1,
        cluster={"start": "listen", "host": here.address, "stall": 1.0},
    )
    run = SteppedRun(config, tmp_path, here)
    try:
        run.until("happened", "listening")
        network.slow_down(1, 2_000_000)
        command = [sys.executable, "-m", "penstock.cluster.worker"]
        there.start(*command, str(tmp_path / "run" / "cluster.json"), stderr=subprocess.DEVNULL)
        run.step()
        assert {place["host"] for place in run.places()} == {there.address}
        weights = run.end()
    finally:
        run.close()
    assert (run.losses, weights) == alone(text, tmp_path / "alone", 1, model=model)
