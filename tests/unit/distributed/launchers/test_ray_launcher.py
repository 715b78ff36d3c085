"""What is said where engines cannot be put on Ray; no Ray is started here."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from waiting import wait_until

from penstock.config import Config
from penstock.distributed.control.worker_replacement import WorkerSupervisor
from penstock.distributed.launchers import ray as on_ray
from penstock.distributed.launchers.ray import RayConnection, RayLauncher, RayWorker
from penstock.errors import ClusterError, ConfigError


@pytest.fixture(autouse=True)
def _mode(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # nothing is decided for the tests that follow


def config(**cluster) -> Config:
    return Config.from_mapping({"model": "gpt2", "cluster": {"start": "ray", **cluster}})


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port that is taken, so that nobody else comes to listen there, and refuses everybody."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_missing_ray_names_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[cluster\]'"):
        RayConnection(config(), "cpu")


def test_unset_environment_variable_is_refused(monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(ConfigError, match=r"cluster\.environment: NOT_THERE is not set in"):
        RayConnection(config(environment=["NOT_THERE"]), "cpu")


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_address_without_listener_is_refused(scheme, deaf_port):
    address = f"{scheme}127.0.0.1:{deaf_port}"
    with pytest.raises(ClusterError, match=rf"cluster\.address: {address}: .*refused"):
        RayConnection(config(address=address), "cpu")


def test_worker_reports_unreachable_run(deaf_port):
    run = ("127.0.0.1", deaf_port)
    said = RayWorker("/nowhere").serve(run, "a token", "worker-1", "engine")
    assert "refused" in said
    assert said.endswith("must be able to reach the run's process, see cluster.host")


class IdleRay:
    """A Ray that this process is connected to already, and that is asked for nothing."""

    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict]:
        """A head without processors for workers, two nodes, and one that is dead."""
        return [
            {"Alive": alive, "Resources": {"CPU": cores} if cores else {}}
            for alive, cores in ((True, 0), (True, 16.0), (True, 1.0), (False, 16.0))
        ]


class UnreachableRay(IdleRay):
    """A Ray that connects and then answers nothing."""

    def __init__(self) -> None:
        self.is_connected = False

    def is_initialized(self) -> bool:
        return self.is_connected

    def init(self, **options) -> None:
        self.is_connected = True

    def nodes(self) -> list[dict]:
        raise ConnectionError("its head is gone")

    def shutdown(self) -> None:
        self.is_connected = False


def test_failed_connection_leaves_no_ray(monkeypatch):
    """Else the next run of this process would take that Ray for the user's own."""
    ray = UnreachableRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ConnectionError):
        RayConnection(config(), "cpu")
    assert not ray.is_connected


@pytest.mark.parametrize(
    ("device", "address", "engine", "shard"),
    [
        ("cuda", "auto", (8, 1), (1, 0)),
        ("cpu", "auto", (8, 0), (1, 0)),
        ("cuda", None, (0, 1), (0, 0)),
        ("cpu", None, (0, 0), (0, 0)),
    ],
)
def test_engines_request_gpu_and_threads_and_shards_do_not(
    device, address, engine, shard, monkeypatch
):
    monkeypatch.setitem(sys.modules, "ray", IdleRay())
    run = {"model": "gpt2", "engine": {"threads": 8}}
    given = Config.from_mapping({**run, "cluster": {"start": "ray", "address": address}})
    connection = RayConnection(given, device)
    wants = connection.wants.items()
    found = {role: (each["num_cpus"], each["num_gpus"]) for role, each in wants}
    assert connection.hosts == 2
    assert found == {"engine": engine, "shard": shard, "relay": (0, 0)}


def pretended(ray) -> SimpleNamespace:
    """Return a connection to a Ray that is none."""
    wants = {
        "engine": {"num_cpus": 16, "num_gpus": 1},
        "shard": {"num_cpus": 1, "num_gpus": 0},
        "relay": {"num_cpus": 0, "num_gpus": 0},
    }
    return SimpleNamespace(ray=ray, options={"max_restarts": 0}, wants=wants, close=lambda: None)


class FullRay:
    """A Ray whose actors wait for room until there is some."""

    def __init__(self) -> None:
        self.resources = {"CPU": 16.0, "GPU": 1.0}
        self.free: dict[str, float] = {}
        self.has_room = False
        self.made = 0
        self.options: list[dict] = []

    def remote(self, kind):
        return SimpleNamespace(options=self.with_options)

    def with_options(self, **options):
        self.options.append(options)
        return SimpleNamespace(remote=self.actor)

    def actor(self, folder):
        self.made += 1
        where, serving = f"where {self.made}", f"serving {self.made}"
        return SimpleNamespace(
            where=SimpleNamespace(remote=lambda: where),
            serve=SimpleNamespace(remote=lambda *_: serving),
        )

    def wait(self, references, num_returns, timeout):
        time.sleep(0.001)
        return [r for r in references if self.has_room and r.startswith("where")], []

    def get(self, reference):
        return ("a-node", 7, "its id")

    def nodes(self):
        return [{"NodeID": "its id", "Alive": True, "Resources": self.resources}]

    def available_resources(self):
        return self.free

    def kill(self, handle) -> None:
        """It is gone."""


STARTING = (
    "their processes are still starting, which takes long on a busy machine and when Python's "
    "packages are read for the first time"
)
EACH = "each shard needs 1 CPU(s) and each engine needs 16 CPU(s) and 1 GPU(s) (engine.threads)"


@pytest.mark.parametrize(
    ("there", "free", "wants", "expected"),
    [
        (
            {"CPU": 16.0, "GPU": 1.0},
            {"CPU": 0.0},
            None,
            f"the Ray cluster is too small for all workers, {EACH}. They start when resources are "
            "free: see `ray status`; add nodes, or lower engines, cluster.spare or engine.threads",
        ),
        ({"CPU": 64.0, "GPU": 4.0}, {"CPU": 32.0, "GPU": 2.0}, None, STARTING),
        (
            {"CPU": 64.0, "GPU": 4.0},
            {"CPU": 8.0},  # taken by others, or by these while their processes start
            None,
            f"{EACH}. They are still starting, or other jobs use these resources of the Ray "
            "cluster: see `ray status`",
        ),
        # Started here for the run alone: nobody asks for anything, and there is always room.
        ({"CPU": 1.0}, {}, {"num_cpus": 0, "num_gpus": 0}, STARTING),
    ],
)
def test_late_actors_are_reported_with_reason(there, free, wants, expected, monkeypatch):
    ray = FullRay()
    ray.resources, ray.free = there, free
    connection = pretended(ray)
    if wants is not None:
        connection.wants = {"engine": wants, "shard": wants}
    now, later = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now() + later[0])
    launcher = RayLauncher(connection, ("10.0.0.1", 1), "token")
    try:
        assert launcher.start("shard") == "worker-1"
        assert launcher.start("engine") == "worker-2"
        wait_until(lambda: ray.made == 2)
        assert launcher.waits_for() is None
        later[0] = 20.0
        expected = f"2 of 2 workers have not started in 15 s: {expected}"
        # The launcher's thread looks at what is free.
        wait_until(lambda: launcher.waits_for() == expected, expected)
        if wants is None:
            assert [(o["num_cpus"], o["num_gpus"]) for o in ray.options] == [(1, 0), (16, 1)]
        ray.has_room = True
        wait_until(lambda: launcher.waits_for() is None)
    finally:
        launcher.close()


@pytest.mark.parametrize("is_one_node", [True, False])
def test_starvation_is_known_only_on_single_node_ray(is_one_node, monkeypatch):
    """Elsewhere the process of that number is another one."""
    asked = []
    monkeypatch.setattr(on_ray, "would_run", lambda pid: asked.append(pid) or True)
    ray = FullRay()
    connection = pretended(ray)
    connection.is_one_node = is_one_node
    launcher = RayLauncher(connection, ("10.0.0.1", 1), "token")
    try:
        worker = launcher.start("engine")
        assert not launcher.starves(worker)  # it has not begun
        ray.has_room = True
        wait_until(lambda: worker in launcher.pids)
        assert launcher.starves(worker) is is_one_node
        assert asked == ([7] if is_one_node else [])
    finally:
        launcher.close()


class RayError(Exception):
    """As Ray's."""


class ActorUnavailableError(RayError):
    """As Ray's: it may be dead, or behind a cable that is cut."""


class CutRay(FullRay):
    """A Ray that cannot reach an actor any more."""

    exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=ActorUnavailableError)

    def __init__(self, error: RayError) -> None:
        super().__init__()
        self.error, self.killed = error, 0

    def wait(self, references, num_returns, timeout):
        return [max(references)], []  # where it is before what became of it

    def get(self, reference):
        if reference.startswith("where"):
            return super().get(reference)
        raise self.error

    def kill(self, handle) -> None:
        self.killed += 1


@pytest.mark.parametrize("kind", [RayError, ActorUnavailableError])
def test_unreachable_actor_is_killed(kind):
    """It may be alive, and would compute for nobody, or come back as one more engine."""
    text = "It is unavailable: RPC error. Some common causes include: (1) many, and many more"
    ray = CutRay(kind(f"a heading\n{text}\n"))
    connection = pretended(ray)
    launcher = RayLauncher(connection, ("10.0.0.1", 1), "token")
    try:
        launcher.start("engine")
        ended = wait_until(launcher.poll)
        assert [each.how for each in ended] == [
            "worker-1 on a-node with pid 7 ended: It is unavailable: RPC error."
        ]
        assert ray.killed == 1
    finally:
        launcher.close()


class LostRay(FullRay):
    """A Ray that stops answering: at the first actor, or once it runs."""

    def __init__(self, answers: bool) -> None:
        super().__init__()
        self.answers = answers

    def nodes(self):
        if not self.answers:
            raise ConnectionError("a heading\nits head is gone")
        return super().nodes()

    def wait(self, references, num_returns, timeout):
        if not self.answers:
            raise ConnectionError("a heading\nits head is gone")
        return super().wait(references, num_returns, timeout)


LOST = "Ray no longer responds: its head is gone"


def test_workers_requested_of_lost_ray_are_reported():
    """Else the run would wait for them without end."""
    launcher = RayLauncher(pretended(LostRay(answers=False)), ("10.0.0.1", 1), "token")
    ended: list[str] = []
    try:
        for _ in range(3):
            launcher.start("engine")
        wait_until(lambda: ended.extend(each.how for each in launcher.poll()) or len(ended) == 3)
        assert ended == [
            "worker-1 was not started: its head is gone",
            f"worker-2 was not started: {LOST}",
            f"worker-3 was not started: {LOST}",
        ]
    finally:
        launcher.close()


def test_run_that_lost_ray_gives_up_replacing_its_engines():
    """The engines that still compute go on; without enough of them the run ends with the reason."""
    ray = LostRay(answers=True)
    launcher = RayLauncher(pretended(ray), ("10.0.0.1", 1), "token")
    events: list[str] = []
    supervisor = WorkerSupervisor(
        launcher, lambda kind, text: events.append(f"{kind}: {text}"), join_seconds=600.0
    )
    wanted = {"engine": 2}
    try:
        supervisor.fill(wanted)
        wait_until(lambda: ray.made == 2)
        for worker in ("worker-1", "worker-2"):
            supervisor.mark_ready(worker)
        ray.answers = False
        wait_until(lambda: supervisor.replace(wanted) or supervisor.given_up)
        assert supervisor.given_up.endswith(f"was not started: {LOST}")
        assert events[:2] == [
            f"worker ended: worker-{number} is not observed: {LOST}" for number in (1, 2)
        ]
    finally:
        launcher.close()


class ThreeNodes(FullRay):
    """A Ray with a head that has no processor, and three nodes."""

    def nodes(self):
        sizes = {"head": 0.0, "a": 16.0, "b": 16.0, "c": 4.0}
        return [
            {"NodeID": name, "Alive": True, "Resources": {"CPU": cpus, "GPU": float(name in "ab")}}
            for name, cpus in sizes.items()
        ]


def test_relays_go_to_the_nodes_with_the_fewest_workers(monkeypatch):
    ray = ThreeNodes()
    monkeypatch.setattr(on_ray, "_preferring", lambda node: {"node": node})
    launcher = RayLauncher(pretended(ray), ("127.0.0.1", 1), "a token")
    try:
        for role in ("engine", "engine", "relay", "relay", "relay", "relay"):
            launcher.start(role)
        wait_until(lambda: len(ray.options) == 6)
        found = [(options["num_cpus"], options["node"]) for options in ray.options]
        assert found[:3] == [(16, "a"), (16, "b"), (0, "c")]  # where no engine is
        # One beside each engine and one more: the links of all nodes carry as much.
        assert sorted(found[3:]) == [(0, "a"), (0, "b"), (0, "c")]
    finally:
        launcher.close()
