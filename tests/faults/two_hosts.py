"""Two hosts on one machine: network namespaces with a cable between them, which can be cut.

As a program it is the trainer of a run that listens: it makes a step for every line that it reads,
and says what happens as lines of JSON.

    python two_hosts.py CONFIG
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOSTS = ("penstock-a", "penstock-b")
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
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)  # of a test that was cut
        _ip("netns", "add", host)
    try:
        _ip("link", "add", "pk-a", "netns", HOSTS[0], "type", "veth", "peer", "pk-b")
        _ip("link", "set", "pk-b", "netns", HOSTS[1])
        for host, card, address in zip(HOSTS, ("pk-a", "pk-b"), ADDRESSES, strict=True):
            _ip("-n", host, "address", "add", f"{address}/24", "dev", card)
            _ip("-n", host, "link", "set", card, "up")
            _ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            _ip("netns", "del", host)


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
