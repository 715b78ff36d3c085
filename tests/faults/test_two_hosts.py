"""A run over two hosts whose cable is cut and put back: it goes on, to the same bits."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_cluster_processes import alone, settings, text
from two_hosts import ADDRESSES, on, plug, two_hosts, why_not

SCRIPT = Path(__file__).parent / "two_hosts.py"
__all__ = ["text"]


@pytest.fixture
def hosts():
    """Two hosts, if this machine can play them."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts():
        yield


class Driver:
    """The trainer's process on the first host, and what it has said."""

    def __init__(self, config: dict, folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        self.process = subprocess.Popen(
            on(0, sys.executable, str(SCRIPT), str(path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.losses: list[float] = []
        self.happened: list[str] = []
        self._said: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def until(self, key: str, value: str | None = None, seconds: float = 120.0) -> dict:
        """Return the next thing that it says under a key."""
        deadline = time.monotonic() + seconds
        while True:
            said = self._said.get(timeout=max(0.1, deadline - time.monotonic()))
            assert said is not None, f"it ended with {self.process.wait()}; {self.happened}"
            if "happened" in said:
                self.happened.append(f"{said['happened']}: {said['text']}")
            if "loss" in said:
                self.losses.append(float.fromhex(said["loss"]))
            if key in said and value in (None, said[key]):
                return said

    def step(self) -> dict:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.until("loss")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.join()
        self.process.stdout.close()
        self.process.stdin.close()

    def end(self) -> str:
        self.process.stdin.close()
        weights = self.until("weights")["weights"]
        self.process.wait(timeout=30)
        return weights


def test_a_cut_cable_costs_no_bit(text, hosts, tmp_path):
    config = settings(
        text,
        tmp_path / "run",
        engines=2,
        cluster={"start": "listen", "host": ADDRESSES[0], "stall": 2.0},
    )
    driver = Driver(config, tmp_path)
    workers = []
    try:
        driver.until("happened", "listening")
        for host in (0, 1):
            record = str(tmp_path / "run" / "cluster.json")
            command = [sys.executable, "-m", "penstock.cluster.worker", record]
            workers.append(subprocess.Popen(on(host, *command), stderr=subprocess.DEVNULL))
        for _ in range(2):
            driver.step()
        assert sum(line.startswith("joined") for line in driver.happened) == 2, driver.happened
        plug(there=False)
        cut = driver.step()  # the lease ends, and the engine on this side goes on alone
        assert 0.5 < cut["seconds"] < 10.0
        assert any("silent for" in line for line in driver.happened)
        driver.step()
        plug(there=True)
        deadline = time.monotonic() + 60
        while sum(line.startswith("joined") for line in driver.happened) < 3:
            driver.step()  # it will notice, and come back by itself
            assert time.monotonic() < deadline
            time.sleep(0.2)
        for _ in range(2):
            driver.step()
        weights = driver.end()
    finally:
        driver.kill()
        for worker in workers:
            worker.kill()
            worker.wait()
    assert (driver.losses, weights) == alone(text, tmp_path / "alone", len(driver.losses))
