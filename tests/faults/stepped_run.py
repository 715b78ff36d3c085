"""A run in a process of its own that makes a step when it is told to, and says what happens.

As a program it is that process. It reads orders, one a line, and answers in lines of JSON:

    python stepped_run.py CONFIG
    step        makes a step
    places      says which processes take part, and where each is
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the program needs none
    from hosts import Host

SCRIPT = Path(__file__)


class SteppedRun:
    """The process of a run, and what it has said.

    Args:
        config: of the run.
        host: on which it runs.
        environment: of the process; by default this one's.
    """

    def __init__(
        self,
        config: dict,
        folder: Path,
        host: Host,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        path = folder / f"{Path(config['run']['dir']).name}.json"
        path.write_text(json.dumps(config))
        self._host = host
        self.process = host.start(
            *[sys.executable, str(SCRIPT), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.losses: list[float] = []
        self.happened: list[str] = []
        self.errors: list[str] = []  # what it has said besides
        self._said: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self._listeners = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=self._listen_to_errors, daemon=True),
        ]
        for listener in self._listeners:
            listener.start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))
            else:
                self.errors.append(line)  # Ray's own
        self._said.put(None)

    def _listen_to_errors(self) -> None:
        self.errors.extend(self.process.stderr)

    def until(self, key: str, value: str | None = None, seconds: float = 240.0) -> dict:
        """Return the next thing that it says under a key."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                said = self._said.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {key} in {seconds} s; {self.happened}") from None
            assert said is not None, f"it ended: {self.happened}, {''.join(self.errors)}"
            if "happened" in said:
                self.happened.append(f"{said['happened']}: {said['text']}")
            if "loss" in said:
                self.losses.append(float.fromhex(said["loss"]))
            if key in said and value in (None, said[key]):
                return said

    def step(self) -> dict:
        """Make a step."""
        self._order("step")
        return self.until("loss")

    def places(self) -> list[dict]:
        """Return who takes part: node, worker, process, host and, if it holds one, the shard."""
        self._order("places")
        return self.until("places")["places"]

    def step_until(self, is_so: Callable[[], bool], seconds: float = 240.0) -> None:
        """Make steps until something is so."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, self.happened
            self.step()
            time.sleep(0.2)

    def count(self, kind: str) -> int:
        """Return how often something of a kind has happened."""
        return sum(line.startswith(f"{kind}:") for line in self.happened)

    def _order(self, what: str) -> None:
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """Let it end; return the hash of its weights."""
        self.process.stdin.close()
        weights = self.until("weights")["weights"]
        self.process.wait(timeout=60)
        return weights

    def error(self, seconds: float = 240.0) -> str:
        """Return the line with which it ends by itself."""
        assert self.process.wait(timeout=seconds) == 1
        self._listeners[1].join()
        return self.errors[-1].rstrip("\n")

    def close(self) -> None:
        """End it."""
        self._host.end(self.process)
        for listener in self._listeners:
            listener.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):  # an order that was not taken
                pipe.close()


def main() -> None:
    """Be the run."""
    from penstock.errors import PenstockError
    from penstock.telemetry.events import ClusterEvent
    from penstock.training.trainer import Trainer

    def say(**what: object) -> None:
        print(json.dumps(what), flush=True)

    def hear(event: object) -> None:
        if isinstance(event, ClusterEvent):
            say(happened=event.kind, text=event.text)

    def places(trainer: Trainer) -> list[dict]:
        manager = trainer._runner.manager
        pids = getattr(manager.launcher, "pids", {})
        return [
            {
                "node": member.number,
                "worker": member.worker,
                "pid": pids.get(member.worker),
                "host": member.address[0],
                "shard": None if member.slot is None else member.slot.shard,
            }
            for member in manager.registry.members
        ]

    try:
        trainer = Trainer(json.loads(Path(sys.argv[1]).read_text()), on_event=hear)
        try:
            for line in sys.stdin:
                if line == "places\n":
                    say(places=places(trainer))
                    continue
                done = trainer.run_step()
                say(step=done.step, loss=done.loss.hex(), seconds=done.seconds)
            say(weights=trainer.store.content_hash())
        finally:
            trainer.close()
    except PenstockError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
