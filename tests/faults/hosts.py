"""Hosts on one machine, as many as a test wants, joined by a switch whose cables can be cut.

A host is the namespaces of one process: it has a network card, process numbers, a name, `/tmp/ray`
and `/dev/shm` of its own; all other files are those of the machine, as on a shared file system.
With that process all others of the host end at the same instant, as when its power is cut. It ends
with its input, so nothing is left of a test that was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_RAY = Path("/tmp/ray")  # where every Ray keeps its sockets and logs
_INIT = f"""
set -e
hostname "$1"
mount -t tmpfs -o size=256m tmpfs /dev/shm
mount --bind "$2" {_RAY}
ip link set lo up
echo up
while read -r line; do :; done
"""


class Host:
    """A host that is up until it is killed.

    Args:
        name: how it calls itself.
        folder: which of the machine's is its `/tmp/ray`.
    """

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        _RAY.mkdir(exist_ok=True)
        new = ["--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._started: list[subprocess.Popen] = []
        self._power = subprocess.Popen(
            ["unshare", *new, "bash", "-c", _INIT, "init", name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._power.stdout.readline() != "up\n":
            self.kill()
            raise OSError(f"no namespaces: {self.why}")
        pid = self._power.pid
        self.pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        self.name, self.address = name, ""

    def on(self, *command: str) -> list[str]:
        """Return the command that runs another on this host, in the same folder."""
        spaces = ["--net", "--mount", "--uts", "--pid", f"--wdns={Path.cwd()}"]
        return ["nsenter", f"--target={self.pid}", *spaces, *command]

    def start(self, *command: str, **how: Any) -> subprocess.Popen:
        """Start a process on this host, which is waited for when the host is killed."""
        self._started.append(subprocess.Popen(self.on(*command), **how))
        return self._started[-1]

    @staticmethod
    def end(process: subprocess.Popen) -> None:
        """End a process that was started on a host: not only what waits for it here."""
        if process.poll() is None:
            theirs = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            for pid in theirs.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            process.wait()

    def kill(self) -> None:
        """End all processes of the host, at once."""
        if self._power.stdin.closed:
            return
        self._power.kill()  # and with it, by the kernel, the first process of the host
        self._power.stdin.close()
        self._power.stdout.close()
        with self._power.stderr as said:
            self.why = said.read().strip()
        self._power.wait()
        for process in self._started:
            process.wait()


class Network:
    """Hosts, numbered from 0, and the switch that they are plugged into.

    Args:
        folder: for what is their own.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self.hosts: list[Host] = []
        self.switch = Host("switch", folder / "switch")
        try:
            _ip(self.switch, "link", "add", "switch", "type", "bridge")
            _ip(self.switch, "link", "set", "switch", "up")
            for _ in range(number):
                self.add()
        except BaseException:
            self.close()
            raise

    def add(self) -> Host:
        """Put another host there."""
        number = len(self.hosts)
        host = Host(f"host-{number}", self._folder / f"host-{number}")
        self.hosts.append(host)
        host.address, card, port = f"10.91.0.{number + 1}", "card", f"port-{number}"
        ends = [card, "netns", str(host.pid), "type", "veth"]
        _run("ip", "link", "add", *ends, "peer", port, "netns", str(self.switch.pid))
        _ip(host, "address", "add", f"{host.address}/24", "dev", card)
        _ip(host, "link", "set", card, "up")
        _ip(self.switch, "link", "set", port, "master", "switch")
        self.plug(number, there=True)
        return host

    def plug(self, number: int, *, there: bool) -> None:
        """Cut the cable of a host, or put it back."""
        _ip(self.switch, "link", "set", f"port-{number}", "up" if there else "down")

    def slow_down(self, number: int, bits_per_second: int) -> None:
        """Limit the rate at which a host receives."""
        queue = ["root", "tbf", "rate", f"{bits_per_second}bit", "burst", "32kb", "latency", "1s"]
        space = ["nsenter", f"--target={self.switch.pid}", "--net"]
        _run(*space, "tc", "qdisc", "add", "dev", f"port-{number}", *queue)

    def power_off(self, number: int) -> None:
        """End a host without a word: no connection of its is closed."""
        self.plug(number, there=False)
        self.hosts[number].kill()

    def close(self) -> None:
        """End all."""
        for host in [*self.hosts, self.switch]:
            host.kill()


@pytest.fixture
def network_of(tmp_path) -> Iterator:
    """What makes a network of so many hosts, if this machine can play them."""
    reason = why_not(tmp_path / "try")
    if reason is not None:
        pytest.skip(reason)
    with contextlib.ExitStack() as undo:

        def make(number: int) -> Network:
            network = Network(tmp_path / "network", number)
            undo.callback(network.close)
            return network

        yield make


def why_not(folder: Path) -> str | None:
    """Why this machine cannot play hosts, if it cannot."""
    missing = [name for name in ("ip", "unshare", "nsenter", "bash") if shutil.which(name) is None]
    if missing:
        return f"the `{missing[0]}` command is not there"
    try:
        Network(folder, 1).close()
    except OSError as error:
        return str(error)
    return None


def _ip(host: Host, *words: str) -> None:
    _run("nsenter", f"--target={host.pid}", "--net", "ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
