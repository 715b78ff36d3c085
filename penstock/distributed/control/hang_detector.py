"""Detects workers that hang before they are ready.

A worker builds its role in its main thread. Its heartbeats come from another thread, so they do not
show that the main thread hangs. They report the processor time of the main thread instead. A thread
that compiles, loads libraries or reads files uses processor time, however slow the machine is. A
thread that waits for a lock or for a file system that does not respond uses none.
"""

from penstock.distributed.protocol import Message, StallTimer, message_validation

# Assumed, not measured: a loop that checks a condition twice per second uses less than this share
# of one processor, and a thread that reads a model from a disk uses more.
_LEAST_SHARE = 0.001


class HangDetector:
    """The processor time that the main threads of joining workers have used.

    Args:
        seconds: for how long a main thread may use no processor time.
    """

    def __init__(self, seconds: float) -> None:
        self._limit = seconds
        self._used: dict[int, float] = {}  # by node, as last reported
        self._timers: dict[int, StallTimer] = {}

    def hear(self, node: int, message: Message) -> None:
        """Record the heartbeat of a worker that is not ready.

        **Raises:** `ProtocolError` if the message is malformed.
        """
        if message.body.get("processor_seconds") is not None:  # else the host cannot measure it
            self._used[node] = message_validation.real(message, "processor_seconds")

    def hung(self, now: float, paused: float) -> list[tuple[int, float]]:
        """Return the nodes over the limit, and for how long they have used no processor time.

        Args:
            paused: the seconds since the last call in which no heartbeat could be received.
        """
        found = []
        for node, used in self._used.items():
            timer = self._timers.setdefault(node, StallTimer(_LEAST_SHARE))
            timer.pause(paused)
            stalled = timer.stalled_seconds(now, "joining", {node: used})
            if stalled > self._limit:
                found.append((node, stalled))
        return found

    def forget(self, node: int) -> None:
        """Remove a node that is ready or was lost."""
        self._used.pop(node, None)
        self._timers.pop(node, None)
