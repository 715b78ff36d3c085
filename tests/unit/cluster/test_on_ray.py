"""What is said where engines cannot be put on Ray; no Ray is started here."""

from __future__ import annotations

import socket
import sys

import pytest

from penstock.cluster.on_ray import RayConnection, RayWorker
from penstock.config import Config
from penstock.errors import ClusterError, ConfigError


@pytest.fixture(autouse=True)
def _mode(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # nothing is decided for the tests that follow


def config(**cluster) -> Config:
    return Config.from_mapping({"model": "gpt2", "cluster": {"start": "ray", **cluster}})


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_without_ray_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[cluster\]'"):
        RayConnection(config())


def test_a_variable_that_is_not_set(monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(ConfigError, match=r"cluster\.environment: NOT_THERE is not set here"):
        RayConnection(config(environment=["NOT_THERE"]))


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_nobody_listens_at_the_address(scheme):
    address = f"{scheme}127.0.0.1:{unused_port()}"
    with pytest.raises(ClusterError, match=rf"cluster\.address: {address}: .*refused"):
        RayConnection(config(address=address))


def test_a_worker_that_cannot_reach_the_run_says_so():
    said = RayWorker("/nowhere").serve(("127.0.0.1", unused_port()), "a token", "worker-1")
    assert "refused" in said
    assert said.endswith("the run's process must be reachable from there, see cluster.host")
