"""A Ray cluster of several nodes, each on a host of its own: who is where, who dies, who comes."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
from hosts import network_of
from ray_nodes import CLIENT_PORT, RayNodes
from stepped_run import SteppedRun
from test_cluster_processes import alone, settings, text

__all__ = ["network_of", "text"]

# On other hosts nobody sees that a worker only waits for a processor, and here all share two.
LEASE = 4.0


@pytest.fixture
def cluster(network_of, tmp_path) -> Callable[..., RayNodes]:
    """What makes a cluster: on how many hosts of how many nodes are started at once."""

    def make(nodes: int, hosts: int | None = None) -> RayNodes:
        made = RayNodes(network_of(hosts or nodes), tmp_path)
        made.start_head()
        for host in range(1, nodes):
            made.start(host)
        for host in range(nodes):
            made.await_node(host)
        return made

    return make


@pytest.fixture
def run_on(text, tmp_path) -> Iterator[Callable[..., SteppedRun]]:
    """What begins a run of a cluster on one of its hosts."""
    runs = []

    def begin(
        nodes: RayNodes,
        host: int,
        *,
        name: str = "run",
        cluster: dict | None = None,
        environment: dict[str, str] | None = None,
        **changes,
    ) -> SteppedRun:
        keys = {"start": "ray", "address": nodes.address, "spare": 0, "lease": LEASE}
        config = settings(text, tmp_path / name, cluster=keys | (cluster or {}), **changes)
        theirs = environment or nodes.environment
        runs.append(SteppedRun(config, tmp_path, nodes.hosts[host], theirs))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def engines_on(run: SteppedRun) -> dict[str, list[dict]]:
    """The engines of a run by their hosts."""
    found = defaultdict(list)
    for place in run.places():
        if place["shard"] is None:
            found[place["host"]].append(place)
    return found


@pytest.mark.slow
def test_engines_are_on_two_hosts_and_one_host_dies(text, cluster, run_on, tmp_path):
    nodes = cluster(2)
    run = run_on(nodes, 0, engines=2)
    run.step()
    run.step_until(lambda: len(run.places()) == 2)
    assert sorted(engines_on(run)) == [host.address for host in nodes.hosts]
    run.step()
    nodes.network.power_off(1)
    lost = run.step()
    assert LEASE - 1.0 < lost["seconds"] < LEASE + 10.0
    run.step()
    weights = run.end()
    assert any("silent for" in line for line in run.happened)
    assert (run.losses, weights) == alone(text, tmp_path / "alone", len(run.losses))


@pytest.mark.slow
def test_replicas_are_on_two_hosts_and_one_host_dies(text, cluster, run_on, tmp_path):
    nodes = cluster(2)
    here, other = nodes.hosts
    store = {"shards": 1, "replicas": 2}
    run = run_on(nodes, 0, engines=2, store=store, cluster={"shards": "apart"})
    run.step()
    run.step_until(lambda: len(run.places()) == 4)
    places = run.places()
    assert sorted(place["host"] for place in places if place["shard"] == 0) == [
        here.address,
        other.address,
    ]
    assert sorted(engines_on(run)) == [here.address, other.address]
    run.step()
    nodes.network.power_off(1)
    for _ in range(2):
        run.step()
    assert {place["host"] for place in run.places()} == {here.address}
    assert [run.count(kind) for kind in ("replica lost", "engine lost")] == [1, 1]
    assert not run.count("shard lost")
    weights = run.end()
    assert (run.losses, weights) == alone(text, tmp_path / "alone", len(run.losses))


@pytest.mark.slow
def test_engines_on_three_hosts_are_killed_disconnected_and_added(text, cluster, run_on, tmp_path):
    nodes = cluster(2, hosts=3)
    here, other, third = nodes.hosts
    run = run_on(nodes, 0, engines=2)
    run.step()
    run.step_until(lambda: len(run.places()) == 2)
    assert sorted(engines_on(run)) == [here.address, other.address]

    # A process: noticed at once, and another is started where it was.
    [engine] = engines_on(run)[other.address]
    subprocess.run(other.on("kill", "-9", str(engine["pid"])), check=True)
    run.step_until(lambda: run.count("joined") == 3)
    assert sorted(engines_on(run)) == [here.address, other.address]
    [ended] = [line for line in run.happened if line.startswith("worker ended")]
    assert f"{engine['worker']} on host-1 with pid {engine['pid']} ended:" in ended

    # A node that is started later: where there is no room else, the next engines come there.
    nodes.start(2)
    nodes.await_node(2)
    scale = [sys.executable, "-m", "penstock", "scale", str(tmp_path / "run"), "engines=3"]
    done = subprocess.run(
        third.on(*scale), env=nodes.environment, capture_output=True, text=True, check=True
    )
    assert "2 engines before, 3 from the next step" in done.stdout
    run.step_until(lambda: len(run.places()) == 3)
    assert sorted(engines_on(run)) == [here.address, other.address, third.address]

    # A cable: noticed by the lease. Ray takes half a minute more; the next engine goes elsewhere.
    nodes.network.plug(1, there=False)
    cut = run.step()
    assert LEASE - 1.0 < cut["seconds"] < LEASE + 10.0
    assert any("silent for" in line for line in run.happened)
    run.step_until(lambda: len(run.places()) == 3)
    assert other.address not in engines_on(run)
    nodes.network.plug(1, there=True)

    # A whole host.
    nodes.network.power_off(2)
    run.step_until(lambda: run.count("engine lost") >= 3)
    run.step()
    weights = run.end()
    assert (run.losses, weights) == alone(text, tmp_path / "alone", len(run.losses))


@pytest.mark.slow
def test_process_outside_cluster_needs_token(text, cluster, run_on, tmp_path):
    nodes = cluster(2, hosts=3)
    nodes.await_port(0, CLIENT_PORT)
    address = f"ray://{nodes.hosts[0].address}:{CLIENT_PORT}"
    for name, token in (("wrong", "0" * 64), ("none", None)):
        run = run_on(
            nodes,
            2,
            name=name,
            cluster={"address": address},
            environment=nodes.environment_with(token),
        )
        error = run.error()
        assert error.startswith(f"error: cluster.address: {address}: ")
        assert "RAY_AUTH_TOKEN" in error
        assert "\n" not in error
    run = run_on(nodes, 2, engines=2, cluster={"address": address})
    run.step()
    run.step_until(lambda: len(run.places()) == 2)
    run.step()
    assert sorted(engines_on(run)) == [host.address for host in nodes.hosts[:2]]
    weights = run.end()
    assert (run.losses, weights) == alone(text, tmp_path / "alone", len(run.losses))


@pytest.mark.slow
def test_engines_continue_after_head_dies_until_ray_ends(text, cluster, run_on):
    nodes = cluster(2)
    run = run_on(nodes, 1, engines=2)
    run.step()
    run.step_until(lambda: len(run.places()) == 2)
    nodes.network.power_off(0)
    for _ in range(3):
        run.step()
    assert list(engines_on(run)) == [nodes.hosts[1].address]
    assert run.process.wait(timeout=240) == 1
    assert any("Failed to connect to GCS within 60 seconds" in line for line in run.errors)
    assert not any(line.startswith("Traceback") for line in run.errors)
