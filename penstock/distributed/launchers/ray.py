"""Workers as actors of a Ray cluster. Only this module imports Ray, and only when it is needed.

Ray places processes and starts them; Ray carries neither weights nor gradients. Each actor is an
ordinary worker: it joins over Penstock's own connections and is supervised by them. Ray reports the
death of a process sooner than a lease expires, and it delivers the run's token to the workers.
"""

import contextlib
import logging
import math
import os
import queue
import secrets
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.distributed.control_messages import Role
from penstock.distributed.launchers.base import WorkerExit
from penstock.distributed.launchers.local import would_run
from penstock.distributed.launchers.ray_placement import PlacementPolicy
from penstock.distributed.transport import Address, own_host
from penstock.distributed.worker import Worker
from penstock.errors import ClusterError, ConfigError, PenstockError, install_extra

log = logging.getLogger("penstock.distributed")

_OBJECTS_BYTES = 80 << 20  # Ray's minimum; the run stores nothing there
_POLL_SECONDS = 0.05  # seconds between two checks for requests
_DEATH_SECONDS = 0.25  # seconds in which a healthy node reports a dead process
_END_SECONDS = 10.0  # seconds in which killed actors should end
_CONNECT_SECONDS = 5.0  # seconds for the first connection to the cluster's address
_LONGEST_REASON = 300
_LATE_SECONDS = 15.0  # seconds after which actors that have not started are reported
_QUERY_SECONDS = 1.0  # seconds between two queries of the cluster's free resources


class RayConnection:
    """This process's connection to Ray: an existing Ray is joined, else Ray is started for the run.

    Args:
        config: of the run.
        device: the device of the run's engines.

    Raises:
        ConfigError: Ray is not installed, or a variable for the actors is not set.
        ClusterError: the cluster does not exist, or it refuses this process.
    """

    def __init__(self, config: Config, device: str) -> None:
        from penstock.engine import target_of

        address = config.cluster.address
        is_local = address is None
        variables = _variables(config.cluster.environment)
        if is_local:
            _require_tokens()
        self.ray = ray = _import_ray()
        self._is_ours = not ray.is_initialized()  # a notebook may be connected already
        self.is_one_node = is_local and self._is_ours  # started for the run, on this machine
        if self._is_ours:
            _connect(ray, address)
        # On one machine `engines` limits the number of workers, as with cluster.start: local.
        threads = 0 if is_local else config.engine.threads or 1
        self.wants: Mapping[Role, Mapping[str, int]] = {
            "engine": {"num_cpus": threads, "num_gpus": target_of(device).gpus},
            "shard": {"num_cpus": min(threads, 1), "num_gpus": 0},
            # A waiting relay must not take the processor of an engine that replaces a lost one.
            "relay": {"num_cpus": 0, "num_gpus": 0},
        }
        self.options: dict[str, Any] = {
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,  # the run decides which workers are restarted
        }
        if variables and not self.is_one_node:  # a Ray started here inherits them
            self.options["runtime_env"] = {"env_vars": variables}
        try:
            has_room = (n["Alive"] and n["Resources"].get("CPU", 0) >= 1 for n in ray.nodes())
            self.hosts = sum(has_room)
            self.host = "127.0.0.1" if self.is_one_node else _host(ray, address)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; stop Ray if it was started here."""
        if self._is_ours:
            self._is_ours = False
            self.ray.shutdown()


class RayWorker:
    """A worker in the process of an actor.

    Args:
        folder: the working directory of the trainer. If the folder exists on this host, relative
            paths have the same meaning here.
    """

    def __init__(self, folder: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        if Path(folder).is_dir():
            os.chdir(folder)
            sys.path.insert(0, folder)

    def where(self) -> tuple[str, int, str]:
        """Return the host name, the process number, and Ray's identifier of the node."""
        node = _import_ray().get_runtime_context().get_node_id()
        return socket.gethostname(), os.getpid(), str(node)

    def serve(self, address: Address, token: str, name: str, role: Role) -> str:
        """Run an engine, a shard or a relay until the run ends; return the reason of the end."""
        try:
            Worker(address, token, name, role).serve()
        except ClusterError as error:
            return f"{error}; this host must be able to reach the run's process, see cluster.host"
        except PenstockError as error:
            return str(error)
        return "the run has ended"


@dataclass
class _Actor:
    handle: Any
    where: Any  # a reference to host, process and node, until they are known
    serving: Any  # a reference that is ready when the worker has ended
    role: Role
    node: str | None  # the actual or requested node
    process: tuple[str, int] | None = None  # host and process, once it has started
    is_ended: bool = False  # ended by the run
    requested_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Resources:
    """The nodes of a cluster, and the free resources of all nodes together."""

    nodes: Sequence[Mapping[str, Any]]
    free: Mapping[str, float]

    def fit_now(self, wants: Sequence[Mapping[str, int]]) -> bool:
        """Tell whether the free resources, and the size of some node, cover each request."""
        return all(_covers(self.free, each) for each in wants) and self._have_nodes_for(wants)

    def fit_when_idle(self, wants: Sequence[Mapping[str, int]]) -> bool:
        """Tell whether the idle cluster would have the resources for all requests together."""
        alive = [node["Resources"] for node in self.nodes if node["Alive"]]
        idle = {name: sum(node.get(name, 0) for node in alive) for name in ("CPU", "GPU")}
        total = {name: sum(each[name] for each in wants) for name in ("num_cpus", "num_gpus")}
        return _covers(idle, total) and self._have_nodes_for(wants)

    def _have_nodes_for(self, wants: Sequence[Mapping[str, int]]) -> bool:
        alive = [node["Resources"] for node in self.nodes if node["Alive"]]
        return all(any(_covers(node, each) for node in alive) for each in wants)


def _covers(resources: Mapping[str, float], wants: Mapping[str, int]) -> bool:
    return (
        resources.get("CPU", 0) >= wants["num_cpus"]
        and resources.get("GPU", 0) >= wants["num_gpus"]
    )


class RayLauncher:
    """Starts workers as actors, spread over the nodes of a Ray cluster.

    A separate thread calls Ray, whose replies may be slow: the coordinator must not block.

    Args:
        connection: to Ray; the launcher closes it.
        address: where the coordinator's process listens.
        token: of the run; actors receive it as an argument, over Ray's own connections.
    """

    def __init__(self, connection: RayConnection, address: Address, token: str) -> None:
        self._connection, self._ray = connection, connection.ray
        self._address, self._token = address, token
        self._kind = self._ray.remote(RayWorker)
        self._placement = PlacementPolicy()
        self._started = 0
        self._actors: dict[str, _Actor] = {}  # used by the thread only
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[WorkerExit] = queue.SimpleQueue()
        self._lost: str | None = None  # why Ray does not reply any more
        self._resources: _Resources | None = None  # the latest query, while actors have not started
        self._queried_at = -math.inf
        self._thread = threading.Thread(target=self._supervise, name="penstock ray", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> Mapping[str, int]:
        """The process numbers of the running workers, by worker name; valid on its host."""
        actors = list(self._actors.items())
        return {worker: actor.process[1] for worker, actor in actors if actor.process is not None}

    def start(self, role: Role) -> str:
        """Request one more worker; it starts when a node has the resources."""
        self._started += 1
        worker = f"worker-{self._started}"
        self._requests.put(lambda: self._start(worker, role))
        return worker

    def poll(self) -> list[WorkerExit]:
        """Return the workers that have ended since the last call."""
        ended = []
        with contextlib.suppress(queue.Empty):
            while True:
                ended.append(self._ended.get_nowait())
        return ended

    def waits_for(self) -> str | None:
        """Return how many actors are late, and the reason as far as Ray reports it."""
        waiting = self._late()
        if not waiting or self._lost is not None:
            return None
        count = f"{len(waiting)} of {len(self._actors)}"
        late = f"{count} workers have not started in {_LATE_SECONDS:.0f} s"
        wants = self._connection.wants
        roles = list(dict.fromkeys(actor.role for actor in waiting))
        everyone = [wants[actor.role] for actor in list(self._actors.values())]
        resources = self._resources
        if resources is None or resources.fit_now([wants[role] for role in roles]):
            return (
                f"{late}: their processes are still starting, which takes long on a busy machine "
                "and when Python's packages are read for the first time"
            )
        each = " and ".join(f"each {role} needs {_in_words(wants[role])}" for role in roles)
        if resources.fit_when_idle(everyone):
            return (
                f"{late}: {each} (engine.threads). They are still starting, or other jobs use "
                "these resources of the Ray cluster: see `ray status`"
            )
        return (
            f"{late}: the Ray cluster is too small for all workers, {each} (engine.threads). They "
            "start when resources are free: see `ray status`; add nodes, or lower engines, "
            "cluster.spare or engine.threads"
        )

    def _late(self) -> list[_Actor]:
        late = time.monotonic() - _LATE_SECONDS
        actors = list(self._actors.values())
        return [a for a in actors if a.process is None and a.requested_at < late]

    @property
    def hosts(self) -> int | None:
        """The number of nodes that had processors for workers when the run started."""
        return self._connection.hosts

    def starves(self, worker: str) -> bool:
        """Tell whether a worker waits for a processor; False if Ray has other nodes."""
        pid = self.pids.get(worker)
        return self._connection.is_one_node and pid is not None and would_run(pid)

    def end(self, worker: str) -> None:
        """Kill a worker, even a stopped one; `poll` reports its exit."""
        self._requests.put(lambda: self._kill(worker))

    def close(self) -> None:
        """End all workers and close the connection."""
        self._requests.put(None)
        self._thread.join(timeout=2 * _END_SECONDS)
        self._connection.close()

    # In the thread

    def _supervise(self) -> None:
        try:
            while self._run_requests():
                self._watch()
                self._query_resources()
        except Exception as error:  # Ray raises many kinds; the running engines continue
            self._lose_ray(error)
            while (request := self._requests.get()) is not None:
                request()
        else:
            with contextlib.suppress(Exception):  # without Ray, actors end with the run
                self._end_all()

    def _lose_ray(self, error: Exception) -> None:
        """Report all workers: their ends would not be reported, and the run would wait for them."""
        self._lost = f"Ray no longer responds: {_reason(error)}"
        log.error("%s; lost engines are not replaced", self._lost)
        for worker in self._actors:
            self._ended.put(WorkerExit(worker, f"{worker} is not observed: {self._lost}"))

    def _run_requests(self) -> bool:
        """Start and end workers as requested; return whether to continue."""
        with contextlib.suppress(queue.Empty):
            while True:
                request = self._requests.get(timeout=0 if self._actors else _POLL_SECONDS)
                if request is None:
                    return False
                request()
        return True

    def _start(self, worker: str, role: Role) -> None:
        if self._lost is not None:
            self._ended.put(WorkerExit(worker, f"{worker} was not started: {self._lost}"))
            return
        try:
            self._actors[worker] = self._make_actor(worker, role)
        except Exception as error:
            self._ended.put(WorkerExit(worker, f"{worker} was not started: {_reason(error)}"))
            raise

    def _make_actor(self, worker: str, role: Role) -> _Actor:
        wants, actors = self._connection.wants[role], list(self._actors.values())
        is_relay = role == "relay"
        # A relay's link carries as much as that of any other worker, so all of them count. A node
        # without processors for workers, such as many a head, is for none.
        alike = [actor.node for actor in actors if is_relay or actor.role == role]
        node = self._placement.choose(
            self._ray.nodes(),
            {"CPU": 1 if is_relay else wants["num_cpus"], "GPU": wants["num_gpus"]},
            alike=alike,
            others=[actor.node for actor in actors if actor.role != role],
        )
        options = {**self._connection.options, **wants}
        options |= {} if node is None else _preferring(node)
        actor = self._kind.options(**options).remote(str(Path.cwd()))
        where = actor.where.remote()
        serving = actor.serve.remote(self._address, self._token, worker, role)
        return _Actor(actor, where, serving, role, node)

    def _kill(self, worker: str) -> None:
        actor = self._actors.get(worker)
        if actor is None or self._lost is not None:
            return
        died, _ = self._ray.wait([actor.serving], num_returns=1, timeout=_DEATH_SECONDS)
        actor.is_ended = not died
        self._ray.kill(actor.handle)

    def _query_resources(self) -> None:
        """Query the cluster's resources at intervals while some workers have not started."""
        now = time.monotonic()
        if self._late() and now - self._queried_at >= _QUERY_SECONDS:
            self._resources = _Resources(self._ray.nodes(), self._ray.available_resources())
            self._queried_at = now

    def _watch(self) -> None:
        """Wait briefly for events of actors, and record them."""
        owners = {}
        for worker, actor in self._actors.items():
            owners[actor.serving] = worker
            if actor.process is None:
                owners[actor.where] = worker
        if not owners:
            return
        ready, _ = self._ray.wait(list(owners), num_returns=1, timeout=_POLL_SECONDS)
        for reference in ready:
            worker = owners[reference]
            actor = self._actors[worker]
            try:
                found = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                found = "the run stopped it" if actor.is_ended else _reason(error)
                if isinstance(error, self._ray.exceptions.ActorUnavailableError):
                    actor.is_ended = True  # it may be alive, behind a broken network
            else:
                if reference == actor.where:  # with ray:// it is another object
                    host, pid, actor.node = found
                    actor.process = host, pid
                    continue
            self._ray.kill(actor.handle)  # it serves no run any more
            self._has_ended(worker, found)

    def _has_ended(self, worker: str, reason: str) -> None:
        actor = self._actors.pop(worker)
        self._placement.worker_left(actor.node, was_ended=actor.is_ended)
        process = "{} with pid {}".format(*actor.process) if actor.process else "a node"
        self._ended.put(WorkerExit(worker, f"{worker} on {process} ended: {reason}"))

    def _end_all(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor.handle)
        serving = [actor.serving for actor in self._actors.values()]
        if serving:
            self._ray.wait(serving, num_returns=len(serving), timeout=_END_SECONDS)
        self._actors.clear()


def _in_words(wants: Mapping[str, int]) -> str:
    cpus, gpus = wants["num_cpus"], wants["num_gpus"]
    return f"{cpus} CPU(s)" + (f" and {gpus} GPU(s)" if gpus else "")


def _preferring(node: str) -> dict[str, Any]:
    """Return options that prefer a node and allow any other if that node lacks resources."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=True)
    return {"scheduling_strategy": strategy}


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "cluster.start: ray needs Ray, which is not installed; "
            f"{install_extra('cluster')}, or set cluster.start: local"
        ) from None
    return ray


def _require_tokens() -> None:
    """Make a Ray that is started here require a token that only this process has.

    Ray listens on every interface, whatever its settings, and runs any code that it receives. Ray's
    default is a token in the home folder, in a file that others may read.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return  # chosen by the user, or by a Ray that this process started before
    if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if "ray" not in sys.modules:  # an imported Ray ignores changes, and its default is a token
        os.environ["RAY_AUTH_MODE"] = "token"


def _refuse_unreachable(address: str) -> None:
    """Fail at once if nothing listens on the address; Ray would try for minutes."""
    try:
        socket.create_connection(_host_and_port(address), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"cluster.address: {address}: expected the head of a running Ray cluster, {error}"
        ) from None


def _host_and_port(address: str) -> Address:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return host.strip("[]"), int(port)


def _connect(ray: Any, address: str | None) -> None:
    if address is not None and address != "auto":
        _refuse_unreachable(address)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            ray.init(
                address="local",
                num_cpus=1,  # the number of processes that Ray starts in advance
                include_dashboard=False,
                object_store_memory=_OBJECTS_BYTES,
                **quiet,
            )
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # ray:// prints its warnings twice
                ray.init(address=address, **quiet)
    except Exception as error:  # Ray raises any error of its parts
        if address is None:
            raise ClusterError(f"a Ray cluster could not be started: {_reason(error)}") from None
        raise ClusterError(
            f"cluster.address: {address}: {_reason(error)}. Expected the head of a running Ray "
            "cluster with the same versions of Ray and Python. Except with ray://, this machine "
            "must be a node of the cluster. If the cluster requires a token, set "
            "RAY_AUTH_MODE=token, and give the token in RAY_AUTH_TOKEN, in the file "
            "RAY_AUTH_TOKEN_PATH, or in ~/.ray/auth_token"
        ) from None


def _host(ray: Any, address: str | None) -> str:
    """Return this machine's address as the nodes of the cluster see it."""
    if address is not None and address.startswith("ray://"):
        return own_host(_host_and_port(address))
    return str(ray.util.get_node_ip_address())


def _variables(names: tuple[str, ...]) -> dict[str, str]:
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ConfigError(
            f"cluster.environment: {missing[0]} is not set in this environment; set it, or remove "
            "it from the list"
        )
    paths = ["PYTHONPATH"] if "PYTHONPATH" in os.environ else []
    return {name: os.environ[name] for name in [*paths, *names]}


def _reason(error: Exception) -> str:
    """Return the last line of Ray's message, without its guesses at causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__
    return text[:_LONGEST_REASON]
