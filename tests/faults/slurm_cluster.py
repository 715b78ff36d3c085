"""A SLURM cluster of hosts on one machine: munged, slurmctld, and a slurmd on each host."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hosts import Host, Network

_COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_CONFIG = """
ClusterName=penstock
SlurmctldHost={control.name}({control.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SlurmdTimeout=10
KillWait=30
MinJobAge=86400
FirstJobId={first_job}
DefMemPerCPU=1000
PartitionName=all Nodes=ALL Default=YES State=UP
"""
_BRIDGE = "172.17.0.1/16"
_NODE = "NodeName={host.name} NodeAddr={host.address} CPUs={cpus} RealMemory=16000 State=UNKNOWN\n"


def why_not() -> str | None:
    """Why there is no SLURM on this machine, if so."""
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        return f"SLURM is not installed ({missing[0]}): apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "only root can start a SLURM whose jobs run as the user who started it"
    return None


class Slurm:
    """A cluster that runs; jobs are submitted from its first host, and run on the others.

    Args:
        folder: of its configuration, state and logs.
        network: of the hosts; they learn each other's names.
        cpus: of each node, as SLURM counts them.
        environment: of those who submit jobs, beside that of this process.
    """

    def __init__(
        self, folder: Path, network: Network, cpus: int, environment: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.control, *self.nodes = network.hosts
        self.environment = {
            **{key: value for key, value in os.environ.items() if "RAY_" not in key},
            **environment,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._configure(cpus)
        for host in network.hosts:
            _run(host, "mount", "--bind", str(folder / "hosts"), "/etc/hosts")
            _have_a_bridge(host)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        listen = ("--foreground", "--force", f"--socket={folder}/munge.socket")
        self._start(self.control, "munged", *listen, *files)
        self.until((folder / "munge.socket").exists, "munged listens")
        self._start(self.control, "slurmctld", "-D")
        for node in self.nodes:
            (folder / f"spool-{node.name}").mkdir()
            self._start(node, "slurmd", "-D", "-N", node.name)
        self.until(lambda: "is UP" in self._said("scontrol", "ping").stdout, "slurmctld answers")
        names = {node.name for node in self.nodes}
        self.until(lambda: self.nodes_by_state().get("idle") == names, "all nodes are idle")

    def _configure(self, cpus: int) -> None:
        config = _CONFIG.format(control=self.control, folder=self.folder, first_job=os.getpid())
        nodes = [_NODE.format(host=node, cpus=cpus) for node in self.nodes]
        (self.folder / "slurm.conf").write_text(config + "".join(nodes))
        (self.folder / "state").mkdir()
        names = [f"{host.address} {host.name}\n" for host in (self.control, *self.nodes)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _start(self, host: Host, *command: str) -> None:
        with (self.folder / f"{command[0]}-{host.name}.said").open("ab") as said:
            host.start(*command, env=self.environment, stdout=said, stderr=said)

    def until(self, is_so: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        """Wait for something; fail with what the cluster says."""
        deadline = time.monotonic() + seconds
        while not is_so():
            logs = [f"{path}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.said")]
            assert time.monotonic() < deadline, "\n".join([f"expected: {what}", *logs])
            time.sleep(0.2)

    def _said(self, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.control.on("env", f"--chdir={folder or self.folder}", *command),
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def ask(self, *command: str, folder: Path | None = None) -> str:
        """Run a command on the host of the controller, in a folder; return what it says."""
        done = self._said(*command, folder=folder)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, folder: Path, *command: str) -> str:
        """Submit a job from a folder; return its number."""
        return self.ask("sbatch", "--parsable", *command, folder=folder).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM says of a job."""
        said = self.ask("scontrol", "show", "job", "--oneliner", number)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def nodes_by_state(self) -> dict[str, set[str]]:
        """Return the names of the nodes by what SLURM thinks of them: idle, mixed, down*."""
        found: dict[str, set[str]] = {}
        for line in self.ask("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines():
            name, state = line.split()
            found.setdefault(state, set()).add(name)
        return found


def programs(node: Host) -> dict[Path, str]:
    """Return the folders in /proc and the command lines of what runs on a node beside SLURM's own
    daemon."""
    found = {}
    space = os.readlink(f"/proc/{node.pid}/ns/pid")
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int(path.name) != node.pid and os.readlink(path / "ns/pid") == space:
                found[path] = (path / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue  # it has ended
    # Without a command line it has ended too.
    return {path: line for path, line in found.items() if line and not line.startswith("slurmd ")}


def _have_a_bridge(host: Host) -> None:
    """Give a host, before its own address, that of a bridge for containers: it leads nowhere."""
    own = f"{host.address}/24"
    _run(host, "ip", "address", "delete", own, "dev", "card")
    for address in (_BRIDGE, own):
        _run(host, "ip", "address", "add", address, "dev", "card")


def _run(host: Host, *command: str) -> None:
    subprocess.run(host.on(*command), check=True)
