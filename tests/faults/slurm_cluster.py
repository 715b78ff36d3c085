"""A SLURM cluster of whole hosts on one machine: munged, slurmctld, and a slurmd on each host."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import whole_hosts
from whole_hosts import Host

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
_NODE = "NodeName={host.name} NodeAddr={host.address} CPUs={cpus} RealMemory=16000 State=UNKNOWN\n"


def why_not() -> str | None:
    """Why there can be no SLURM cluster on this machine, if so."""
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        return f"SLURM is not installed ({missing[0]}): apt-get install slurm-wlm munge"
    return whole_hosts.why_not()


class Slurm:
    """A cluster that runs.

    Args:
        folder: of its configuration, state and logs.
        control: the host of the controller, from which jobs are submitted.
        nodes: the hosts that jobs run on.
        cpus: of each node, as SLURM counts them.
        environment: of those who submit jobs, beside that of this process.
    """

    def __init__(
        self,
        folder: Path,
        control: Host,
        nodes: list[Host],
        cpus: int,
        environment: Mapping[str, str],
    ) -> None:
        self.folder, self.control, self.nodes = folder, control, nodes
        self.environment = {
            **{key: value for key, value in os.environ.items() if "RAY_" not in key},
            **environment,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        lines = [_NODE.format(host=node, cpus=cpus) for node in nodes]
        config = _CONFIG.format(control=control, folder=folder, first_job=os.getpid())
        (folder / "slurm.conf").write_text(config + "".join(lines))
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._start(
            control, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files
        )
        self.until((folder / "munge.socket").exists, "munged listens")
        self._start(control, "slurmctld", "-D")
        for node in nodes:
            self.start_node(node)
        self.until(lambda: "is UP" in self._said("scontrol", "ping").stdout, "slurmctld answers")
        self.until_idle(*nodes)

    def until_idle(self, *nodes: Host) -> None:
        """Wait until nodes are there and have no job."""
        names = {node.name for node in nodes}
        self.until(lambda: names <= self.nodes_by_state().get("idle", set()), f"{names} are idle")

    def start_node(self, node: Host) -> None:
        """Start the daemon of a node."""
        (self.folder / f"spool-{node.name}").mkdir(exist_ok=True)
        self._start(node, "slurmd", "-D", "-N", node.name)

    def _start(self, host: Host, *command: str) -> None:
        said = self.folder / f"{command[0]}-{host.name}.said"
        host.start(*command, environment=self.environment, said=said)

    def until(self, is_so: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        """Wait for something; fail with what the cluster says."""
        deadline = time.monotonic() + seconds
        while not is_so():
            logs = [f"{path}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.said")]
            assert time.monotonic() < deadline, "\n".join([f"expected: {what}", *logs])
            time.sleep(0.2)

    def _said(self, *command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.control.on(*command, folder=folder),
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
