"""A real Ray cluster: the nodes of `ray start` on hosts made of namespaces, with a token."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hosts import Host, Network

PORT, CLIENT_PORT = 6379, 10001
_OBJECTS_BYTES = 80_000_000  # the least that Ray takes
_PATIENCE = 120.0  # seconds


class RayNodes:
    """The nodes of a Ray cluster, one a host.

    Args:
        network: whose hosts they are; the first is the head's.
        folder: for the token and what nodes say.
        cpus: that each node says to have.
    """

    def __init__(self, network: Network, folder: Path, cpus: int = 2) -> None:
        self.network, self._folder, self._cpus = network, folder, cpus
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        ours = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self.environment = {
            **ours,
            "HOME": str(folder),  # no token of whoever runs the tests
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }

    def environment_with(self, token: str | None) -> dict[str, str]:
        """Return the environment of somebody who has another token, or none."""
        theirs = {k: v for k, v in self.environment.items() if not k.startswith("RAY_")}
        if token is not None:
            theirs |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        return theirs

    @property
    def hosts(self) -> list[Host]:
        """Of the network."""
        return self.network.hosts

    @property
    def address(self) -> str:
        """Of the head."""
        return f"{self.network.hosts[0].address}:{PORT}"

    def start_head(self, *more: str) -> None:
        """Start the head, and return when others can come."""
        words = ["--head", f"--port={PORT}", f"--ray-client-server-port={CLIENT_PORT}"]
        self._start(0, *words, "--include-dashboard=false", *more)
        self.await_port(0, PORT)

    def start(self, host: int) -> None:
        """Start another node, which comes when it can, and again if Ray gave it up."""
        self._start(host, f"--address={self.address}")

    def _start(self, host: int, *words: str) -> None:
        ray = shutil.which("ray", path=str(Path(sys.executable).parent)) or "ray"
        here = self.network.hosts[host]
        with self._log(host).open("w") as log:
            here.start(
                *["bash", "-c", 'until "$@"; do sleep 1; done', "node"],
                *[ray, "start", "--block", "--disable-usage-stats"],
                *[f"--node-ip-address={here.address}", f"--num-cpus={self._cpus}"],
                *[f"--object-store-memory={_OBJECTS_BYTES}", "--include-log-monitor=false"],
                *words,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def await_port(self, host: int, port: int) -> None:
        """Return when somebody listens on a port of a host."""
        here = self.hosts[host]
        probe = here.on("bash", "-c", f"exec 3<>/dev/tcp/{here.address}/{port}")
        self._await(host, lambda: not subprocess.run(probe, capture_output=True).returncode)

    def await_node(self, host: int) -> None:
        """Return when a node says that it has begun."""
        self._await(host, lambda: "Ray runtime started" in self._log(host).read_text())

    def _log(self, host: int) -> Path:
        return self._folder / f"ray-{host}.log"

    def _await(self, host: int, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not is_so():
            assert time.monotonic() < deadline, self._log(host).read_text()
            time.sleep(0.1)
