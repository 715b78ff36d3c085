"""Two hosts on one machine: network namespaces with a cable between them, which can be cut.

As a program it is the trainer of a run that listens: it makes a step for every line that it reads,
and says what happens as lines of JSON.

    python two_hosts.py CONFIG
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOSTS = (f"penstock-{os.getpid()}-a", f"penstock-{os.getpid()}-b")
ADDRESSES = ("10.91.0.1", "10.91.0.2")


def why_not() -> str | None:
    """Why this machine cannot play two hosts, if it cannot."""
    if shutil.which("ip") is None:
        return "the `ip` command is not there"
    made = subprocess.run(["ip", "netns", "add", HOSTS[0]], capture_output=True, text=True)
    if made.returncode and "File exists" not in made.stderr:
        return f"no network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", HOSTS[0]], check=True)
    return None


@contextmanager
def two_hosts() -> Iterator[None]:
    """Have two hosts, each with a network card of its own; a cable joins them."""
    _remove_left()
    for host in HOSTS:
        _ip("netns", "add", host)
    try:
        cable = ["pk-a", "netns", HOSTS[0], "type", "veth", "peer", "pk-b", "netns", HOSTS[1]]
        _ip("link", "add", *cable)
        for host, card, address in zip(HOSTS, ("pk-a", "pk-b"), ADDRESSES, strict=True):
            _ip("-n", host, "address", "add", f"{address}/24", "dev", card)
            _ip("-n", host, "link", "set", card, "up")
            _ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            _ip("netns", "del", host)


def _remove_left() -> None:
    """Remove the hosts of tests that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    for host in re.findall(r"^penstock-\d+-[ab]", listed.stdout, re.MULTILINE):
        if not Path("/proc", host.split("-")[1]).exists():
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def plug(there: bool) -> None:
    """Cut the cable, or put it back."""
    _ip("-n", HOSTS[1], "link", "set", "pk-b", "up" if there else "down")


def on(host: int, *command: str) -> list[str]:
    """Return the command that runs another on a host."""
    return ["ip", "netns", "exec", HOSTS[host], *command]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> None:
    """Be the trainer."""
    from penstock.events import ClusterEvent
    from penstock.trainer import Trainer

    def say(**what) -> None:
        print(json.dumps(what), flush=True)

    def hear(event) -> None:
        if isinstance(event, ClusterEvent):
            say(happened=event.kind, text=event.text)

    config = json.loads(Path(sys.argv[1]).read_text())
    trainer = Trainer(config, on_event=hear)
    try:
        for _ in sys.stdin:
            done = trainer.run_step()
            say(step=done.step, loss=done.loss.hex(), seconds=done.seconds)
        say(weights=trainer.store.content_hash())
    finally:
        trainer.close()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
