"""Hosts on one machine, each with a name, a network card and processes of its own.

A host is a process in namespaces of its own. Its end ends every process on it at once, as if the
power were cut, and all hosts end with the process that made them, however that ends: nothing is
left to remove. They share the machine's files, but for the folders that each has for itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

NETWORK = "10.92.0."
BRIDGE = "172.17.0.1/16"  # of containers: every host has it before its own, and it leads nowhere
PRIVATE = ("/dev/shm", "/tmp/ray")  # what hosts that share their other files have for themselves
_SPACES = ("--net", "--uts", "--mount", "--pid")
_INIT = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
shift 2
for folder in "$@"; do mount -t tmpfs -o mode=1777 host "$folder"; done
ip link set lo up
echo ready
read -r || true # until the other end is closed; all that runs here ends with this process
"""


class Host:
    """One of them, which runs.

    Args:
        name: of the host, as `hostname` says it.
        names: a file in the form of /etc/hosts, which it has in place of the machine's.
        address: of its network card; None for a host without one.
        switch: the host that its network card is joined to.
    """

    def __init__(
        self, name: str, names: Path, address: str | None = None, switch: Host | None = None
    ) -> None:
        self.name, self.address = name, address
        self._names, self._switch = names, switch
        self._started: list[subprocess.Popen] = []
        self.boot()

    def boot(self) -> None:
        """Begin to run, also again."""
        for folder in PRIVATE:
            Path(folder).mkdir(exist_ok=True)
        begin = ["bash", "-c", _INIT, "init", self.name, str(self._names), *PRIVATE]
        self._first = subprocess.Popen(
            ["unshare", *_SPACES, "--fork", "--kill-child", "--mount-proc", *begin],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._first.stdout.readline() != "ready\n":
            self.end()
            raise OSError(f"the host {self.name} could not be made")
        outer = self._first.pid
        [self._pid] = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        if self._switch is not None:
            self._join(self._switch)

    def _join(self, switch: Host) -> None:
        """Have a network card, and a bridge of which nobody else is a part."""
        self.run("ip", "link", "add", "bridge", "type", "bridge")
        self.run("ip", "address", "add", BRIDGE, "dev", "bridge")
        self.run("ip", "link", "set", "bridge", "up")
        # In one command, from outside: the machine itself never has these cards.
        port = ["ip", "link", "add", f"to-{self.name}", "netns", switch._pid, "type", "veth"]
        subprocess.run([*port, "peer", "card", "netns", self._pid], check=True)
        switch.run("ip", "link", "set", f"to-{self.name}", "master", "bridge", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "card")
        self.run("ip", "link", "set", "card", "up")

    def on(self, *command: str, folder: Path | None = None) -> list[str]:
        """Return the command that runs another on this host, in a folder."""
        return ["nsenter", f"--target={self._pid}", *_SPACES, f"--wdns={folder or '/'}", *command]

    def run(self, *command: str) -> str:
        """Run a command on this host; return what it says."""
        done = subprocess.run(self.on(*command), capture_output=True, text=True)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *command: str, environment: Mapping[str, str], said: Path) -> None:
        """Start a command that runs until the host ends; what it says is added to a file."""
        with said.open("ab") as file:
            self._started.append(
                subprocess.Popen(self.on(*command), env=environment, stdout=file, stderr=file)
            )

    def processes(self) -> dict[Path, str]:
        """Return the folders in /proc and the command lines of what runs on this host, but for its
        first process."""
        found = {}
        space = os.readlink(f"/proc/{self._pid}/ns/pid")
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if path.name != self._pid and os.readlink(path / "ns/pid") == space:
                    found[path] = (path / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue  # it has ended
        return {path: line for path, line in found.items() if line}  # without it: it has ended too

    def end(self) -> None:
        """End the host and all that runs on it."""
        self._first.kill()
        for process in (self._first, *self._started):
            process.wait()
        self._started.clear()
        self._first.stdin.close()
        self._first.stdout.close()


def why_not() -> str | None:
    """Why this machine cannot play hosts, if it cannot."""
    if os.geteuid() != 0:
        return "hosts of namespaces can be made by root only"
    for command in ("ip", "unshare", "nsenter"):
        if shutil.which(command) is None:
            return f"the `{command}` command is not there"
    made = subprocess.run(["unshare", *_SPACES, "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces: {made.stderr.strip()}" if made.returncode else None


@contextmanager
def whole_hosts(folder: Path, *names: str) -> Iterator[list[Host]]:
    """Have hosts of these names on one network; the first has the address `NETWORK` 1, and so on.

    Args:
        folder: for the file of their names.
        names: of the hosts.
    """
    path = folder / "hosts"
    addresses = {name: f"{NETWORK}{number}" for number, name in enumerate(names, 1)}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    path.write_text("\n".join(lines) + "\n")
    with ExitStack() as made:
        switch = Host("switch", path)
        made.callback(switch.end)
        switch.run("ip", "link", "add", "bridge", "type", "bridge")
        switch.run("ip", "link", "set", "bridge", "up")
        hosts = []
        for name, address in addresses.items():
            hosts.append(Host(name, path, address, switch))
            made.callback(hosts[-1].end)
        yield hosts
