"""Engines of a group of devices, each in a thread of its own, driven like any other engines.

Devices of a group wait for each other: what one does with the others, all must do, and in the same
order. So the calls that one engine is given are given to all, in the end (`Rounds`), and a device
whose computing has failed still does its part of what they do together. Its error is raised to
whoever drives the engines; the group is good for another try.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch

from penstock.collectives import PartialSum
from penstock.engine.interface import Batch, Engine, PendingGradients
from penstock.engine.memory import MemoryAccount
from penstock.engine.shared_slots import SharedSlots
from penstock.errors import GroupError
from penstock.program import Program

_CLOSING_SECONDS = 10.0

Job = Callable[[], None]


@dataclass(frozen=True)
class Member:
    """What a thread makes for its device: an engine, its slots, and how to let go of the group."""

    engine: Engine
    slots: SharedSlots
    leave: Callable[[], None]


@dataclass(frozen=True)
class Call:
    """One of the calls that all devices of a group must be given."""

    method: Literal["load", "forward", "turn", "backward", "infer"]
    stage: int
    weights: Sequence[torch.Tensor] = ()


class Rounds:
    """The calls of a step that some engine of the group has been given.

    Args:
        abort: ends, from any thread, what the group is doing together.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self.engines: list[DeviceThread] = []
        self._abort = abort
        self._calls: list[Call] = []
        self._begun: set[DeviceThread] = set()
        self._broken: Exception | None = None

    def begin(self, engine: DeviceThread) -> None:
        """Take note that an engine begins a step; the first one to do so ends the step before.

        Raises:
            GroupError: the devices have lost each other.
        """
        if engine in self._begun:
            self.level()
            self._calls.clear()
            self._begun.clear()
            for each in self.engines:
                each.given = 0
        self.require_whole()
        self._begun.add(engine)

    def give(self, engine: DeviceThread, call: Call) -> Future[Any]:
        """Give an engine its next call; return what will come of it.

        A call that all engines have is waited for if it is a `load`: what it reads may be gone
        when the next one has returned.

        Raises:
            Exception: what an engine has met in a call before; not while others lack a call.
        """
        if engine.given == len(self._calls):
            if all(each.given == engine.given for each in self.engines):
                self._raise_errors()
            self._calls.append(call)
        coming = engine.take(call)
        if call.method == "load" and all(e.given == len(self._calls) for e in self.engines):
            for each in self.engines:
                each.await_load()
        return coming

    def level(self) -> None:
        """Give every engine the calls that it lacks, for what the group does together.

        They lack some where the driver was interrupted between two engines.
        """
        if self._broken is not None:
            return
        for engine in self.engines:
            engine.error = engine.error or RuntimeError("the step was given up")
        for engine in self.engines:
            for call in self._calls[engine.given :]:
                engine.take(call)

    def close(self) -> None:
        """Have all devices leave the group and end their threads; one that hangs is left behind."""
        self.level()
        for engine in self.engines:
            engine.leave()
        for engine in self.engines:
            if not engine.has_ended():
                self._abort()

    def breaks(self, error: Exception) -> None:
        """Take note that the devices have lost each other, and let none wait for another."""
        if self._broken is None:
            self._broken = error
            self._abort()

    def require_whole(self) -> None:
        """Raise `GroupError` if the devices have lost each other."""
        if self._broken is not None:
            raise GroupError(
                f"the devices of engine.devices have lost each other ({self._broken}); start the "
                "run again, it goes on from what was saved"
            ) from self._broken

    def _raise_errors(self) -> None:
        self.require_whole()
        for engine in self.engines:
            if engine.error is not None:
                raise engine.error


class DeviceThread:
    """The engine of one device, in a thread of its own.

    Args:
        name: of the device, for messages.
        build: makes what the thread needs, in the thread.
        rounds: of the group.
    """

    def __init__(self, name: str, build: Callable[[], Member], rounds: Rounds) -> None:
        self.name = name
        self.given = 0  # of the calls of the step
        self.error: Exception | None = None
        self._rounds = rounds
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs,), name=f"penstock-{name}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        self._building = self._submit(build)
        self._loading: Future[Any] | None = None
        rounds.engines.append(self)

    def start(self) -> None:
        """Return when the device is ready; raise what it met."""
        self._member: Member = self._building.result()
        self.program: Program = self._member.engine.program
        self.memory: MemoryAccount = self._member.engine.memory

    @property
    def stages_ahead(self) -> int:
        """How many stages' weights may be on their way while another stage computes."""
        return self._member.engine.stages_ahead

    def begin(self, batch: Batch) -> None:
        """Take the inputs of a step; forget any step before, and its errors."""
        self._rounds.begin(self)
        self._submit(lambda: None).result()  # what is left of that step has been passed over
        self.error = None
        self._submit(lambda: self._begin(batch))

    def load(self, stage: int, weights: Sequence[torch.Tensor]) -> None:
        """Start moving a stage's weights to the device; they are used by the next call for it."""
        self._rounds.give(self, Call("load", stage, weights))

    def forward(self, stage: int) -> None:
        """Run a stage on all micro-batches, keeping what backward needs."""
        self._rounds.give(self, Call("forward", stage))

    def turn(self, stage: int) -> PendingGradients:
        """Run the last stage forward and backward; return its weights' gradients."""
        return _Coming(self._rounds.give(self, Call("turn", stage)))

    def backward(self, stage: int) -> PendingGradients:
        """Run a stage backward on all micro-batches; return its weights' gradients."""
        return _Coming(self._rounds.give(self, Call("backward", stage)))

    def infer(self, stage: int) -> None:
        """Run a stage forward, keeping nothing for a backward."""
        self._rounds.give(self, Call("infer", stage))

    def results(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the program's results per micro-batch, after `infer` of the last stage."""
        return self._ask(lambda: self._member.engine.results())

    def losses(self) -> list[float]:
        """Return the loss of each micro-batch, once the last stage has run."""
        return self._ask(lambda: self._member.engine.losses())

    def is_finite(self, stage: int) -> bool:
        """Tell, after `infer` of a stage, whether it wrote no NaN and no infinity."""
        return self._ask(lambda: self._member.engine.is_finite(stage))

    # For the rounds

    def leave(self) -> None:
        """Leave the group behind what is to be done, and end the thread."""
        self._submit(lambda: self._building.result().leave())
        self._jobs.put(None)

    def has_ended(self) -> bool:
        """Wait a while for the thread; tell whether it has ended."""
        self._thread.join(timeout=_CLOSING_SECONDS)
        return not self._thread.is_alive()

    def take(self, call: Call) -> Future[Any]:
        """Take a call, and do it behind those before."""
        self.given += 1
        coming = self._submit(lambda: self._do(call))
        if call.method == "load":
            self._loading = coming
        return coming

    def await_load(self) -> None:
        """Return when the last `load` has been done, or has failed."""
        assert self._loading is not None
        self._loading.exception()

    # In the thread

    def _do(self, call: Call) -> Any:
        """Do a call; after an error, only what the group does together."""
        if self.error is None:
            arguments = (call.weights,) if call.method == "load" else ()
            try:
                return getattr(self._member.engine, call.method)(call.stage, *arguments)
            except Exception as error:
                self._fail(error)
        met = self.error
        assert met is not None
        if not isinstance(met, GroupError):
            self._pass_over(call)
        raise met

    def _begin(self, batch: Batch) -> None:
        try:
            self._member.engine.begin(batch)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = error
        if isinstance(error, GroupError):
            self._rounds.breaks(error)
        else:
            error.add_note(f"on {self.name}, one of engine.devices")

    def _pass_over(self, call: Call) -> None:
        slots = self._member.slots
        try:
            if call.method == "load":
                slots.reset()  # nothing waits in a slot any more
                slots.load(call.stage, call.weights)
            else:
                slots.pass_over(call.stage, call.method in ("turn", "backward"))
        except Exception as error:  # it cannot even do its part: nobody may wait for it
            self._rounds.breaks(error)

    def _ask(self, question: Callable[[], Any]) -> Any:
        def answer() -> Any:
            if self.error is not None:
                raise self.error
            return question()

        return self._submit(answer).result()

    def _submit(self, act: Callable[[], Any]) -> Future[Any]:
        coming: Future[Any] = Future()

        def job() -> None:
            try:
                coming.set_result(act())
            except Exception as error:
                coming.set_exception(error)

        self._jobs.put(job)
        return coming


class _Coming:
    """Gradients of a stage that a device has yet to compute."""

    def __init__(self, pending: Future[PendingGradients]) -> None:
        self._pending = pending

    def wait(self) -> list[PartialSum]:
        """Return the sums; raise what the device met."""
        return self._pending.result().wait()


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it refers to the engine, which may go
