"""Every packet that passes a host's network cards, and what can be read in them.

As a program it is the capture. It says `ready`, and when its input ends how many bytes it has seen,
and how often each of its arguments was among them.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the program needs none
    from hosts import Host

_EVERY_PROTOCOL = 3  # ETH_P_ALL


class Capture:
    """Looks for texts in all packets, from now on.

    Args:
        host: whose network cards they pass, such as the switch.
        texts: that are looked for.
    """

    def __init__(self, host: Host, *texts: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), *texts]
        pipe = subprocess.PIPE
        self._process = host.start(*command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout.readline() == "ready\n"

    def end(self) -> tuple[int, dict[str, int]]:
        """Return how many bytes passed, and how often each text was among them."""
        self._process.stdin.close()
        with self._process.stdout as said:
            seen = json.loads(said.read())
        self._process.wait()
        return seen["bytes"], seen["found"]


def main() -> None:
    """Capture until the input ends."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(_EVERY_PROTOCOL))
    packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
    found = dict.fromkeys(sys.argv[1:], 0)
    count, packet = 0, bytearray(1 << 17)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([packets, sys.stdin], [], [])
        if packets in readable:
            size = packets.recv_into(packet)
            count += size
            for text in found:
                found[text] += packet.count(text.encode(), 0, size)
        elif readable:
            break
    print(json.dumps({"bytes": count, "found": found}))


if __name__ == "__main__":
    main()
