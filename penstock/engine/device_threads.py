"""Engines of a group of devices, one thread per device, with the interface of any other engine.

The devices of a group run collective operations: all devices must run the same ones in the same
order. Every call that one engine gets is therefore eventually given to all engines (`Rounds`). A
device whose computation has failed still takes part in the collective operations. Its error is
raised to the caller of the engines; the group can then try again.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, Literal

import torch

from penstock.collectives import PartialSum
from penstock.engine.interface import Batch, Engine, PendingGradients
from penstock.engine.memory import MemoryAccount
from penstock.engine.shared_slots import SharedSlots
from penstock.errors import GroupError
from penstock.program import Program
from penstock.sparsity import StreamedWeight

_CLOSING_SECONDS = 10.0

Job = Callable[[], None]


@dataclass(frozen=True)
class Member:
    """The parts that a thread creates for its device: engine, slots, and the function that leaves
    the group."""

    engine: Engine
    slots: SharedSlots
    leave: Callable[[], None]


@dataclass(frozen=True)
class Call:
    """One call that all devices of a group must get."""

    method: Literal["load", "forward", "turn", "backward", "infer"]
    stage: int
    weights: Sequence[StreamedWeight] = ()


class Rounds:
    """The calls of a step that at least one engine of the group has got.

    Args:
        abort: aborts the group's collective operations, from any thread.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self.engines: list[DeviceThread] = []
        self._abort = abort
        self._calls: list[Call] = []
        self._begun: set[DeviceThread] = set()
        self._broken: Exception | None = None
        self._is_closed = False

    def begin(self, engine: DeviceThread) -> None:
        """Record that an engine begins a step; the first engine to begin also ends the previous
        step.

        Raises:
            GroupError: the group of devices has failed, or was closed.
        """
        self.require_whole()
        if engine in self._begun:
            self.level()
            self._calls.clear()
            self._begun.clear()
            for each in self.engines:
                each.given = 0
        self._begun.add(engine)

    def give(self, engine: DeviceThread, call: Call) -> Future[Any]:
        """Give an engine its next call; return the future of the result.

        A `load` that all engines have got is waited for: its weights may be invalid when the next
        load has returned.

        Raises:
            Exception: the error of an earlier call of an engine; not while other engines lack a
                call.
        """
        if engine.given == len(self._calls):
            if all(each.given == engine.given for each in self.engines):
                self._raise_errors()
            self._calls.append(call)
        future = engine.take(call)
        if call.method == "load" and all(e.given == len(self._calls) for e in self.engines):
            for each in self.engines:
                each.await_load()
        return future

    def level(self) -> None:
        """Give every engine the calls that it lacks, so that collective operations complete.

        An engine lacks calls if the caller was interrupted between two engines.
        """
        if self._broken is not None:
            return
        for engine in self.engines:
            engine.error = engine.error or RuntimeError("the step was aborted")
        for engine in self.engines:
            for call in self._calls[engine.given :]:
                engine.take(call)

    def close(self) -> None:
        """Have all devices leave the group and end their threads; a thread that hangs is
        abandoned."""
        self.level()
        self._is_closed = True
        for engine in self.engines:
            engine.leave()
        for engine in self.engines:
            if not engine.has_ended():
                self._abort()

    def record_failure(self, error: Exception) -> None:
        """Record that the group has failed, and abort its collective operations."""
        if self._broken is None:
            self._broken = error
            self._abort()

    def require_whole(self) -> None:
        """Raise `GroupError` if the group has failed, or its devices were released."""
        if self._is_closed:
            raise GroupError(
                "the devices of engine.devices were released by close(); create a new Trainer: it "
                "continues from the last saved step"
            )
        if self._broken is not None:
            raise GroupError(
                f"the devices of engine.devices can no longer communicate ({self._broken}); start "
                "the run again: it continues from the last saved step"
            ) from self._broken

    def _raise_errors(self) -> None:
        self.require_whole()
        for engine in self.engines:
            if engine.error is not None:
                raise engine.error


class DeviceThread:
    """The engine of one device, in its own thread.

    Args:
        name: of the device, for messages.
        build: creates the parts of the thread, in the thread.
        rounds: the calls of the group.
    """

    def __init__(self, name: str, build: Callable[[], Member], rounds: Rounds) -> None:
        self.name = name
        self.given = 0  # number of the step's calls that this engine has got
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
        """Wait until the device is ready; raise its error, or that of a device which it waits for.

        A device waits for the others of its group, also for one that has failed.
        """
        building = [engine._building for engine in self._rounds.engines]
        for built in wait(building, return_when=FIRST_EXCEPTION).done:
            built.result()
        self._member: Member = self._building.result()
        self.program: Program = self._member.engine.program
        self.memory: MemoryAccount = self._member.engine.memory

    @property
    def stages_ahead(self) -> int:
        """How many stages' weights may be loading while another stage computes."""
        return self._member.engine.stages_ahead

    def begin(self, batch: Batch) -> None:
        """Accept the inputs of a step; discard any earlier step and its errors."""
        self._rounds.begin(self)
        self._submit(lambda: None).result()  # the remaining calls of that step have been skipped
        self.error = None
        self._submit(lambda: self._begin(batch))

    def load(self, stage: int, weights: Sequence[StreamedWeight]) -> None:
        """Start copying a stage's weights to the device; the next call for this stage uses them."""
        self._rounds.give(self, Call("load", stage, weights))

    def forward(self, stage: int) -> None:
        """Run a stage on all micro-batches; keep the values that backward needs."""
        self._rounds.give(self, Call("forward", stage))

    def turn(self, stage: int) -> PendingGradients:
        """Run the last stage forward and backward; return its weights' gradients."""
        return _PendingResult(self._rounds.give(self, Call("turn", stage)))

    def backward(self, stage: int) -> PendingGradients:
        """Run a stage backward on all micro-batches; return its weights' gradients."""
        return _PendingResult(self._rounds.give(self, Call("backward", stage)))

    def infer(self, stage: int) -> None:
        """Run a stage forward; keep nothing for a backward."""
        self._rounds.give(self, Call("infer", stage))

    def results(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the program's results per micro-batch, after `infer` of the last stage."""
        return self._ask(lambda: self._member.engine.results())

    def losses(self) -> list[float]:
        """Return the loss of each micro-batch, once the last stage has run."""
        return self._ask(lambda: self._member.engine.losses())

    def is_finite(self, stage: int) -> bool:
        """Return, after `infer` of a stage, whether its outputs contain no NaN and no infinity."""
        return self._ask(lambda: self._member.engine.is_finite(stage))

    def release(self) -> None:
        """Do nothing: a group's engines keep no such memory."""

    # Called by Rounds

    def leave(self) -> None:
        """Leave the group after all queued calls, and end the thread."""
        self._submit(lambda: self._building.result().leave())
        self._jobs.put(None)

    def has_ended(self) -> bool:
        """Wait a limited time for the thread; return whether it has ended."""
        self._thread.join(timeout=_CLOSING_SECONDS)
        return not self._thread.is_alive()

    def take(self, call: Call) -> Future[Any]:
        """Queue a call behind the earlier ones."""
        self.given += 1
        future = self._submit(lambda: self._do(call))
        if call.method == "load":
            self._loading = future
        return future

    def await_load(self) -> None:
        """Wait until the last `load` has completed or failed."""
        assert self._loading is not None
        self._loading.exception()

    # In the thread

    def _do(self, call: Call) -> Any:
        """Execute a call; after an error, only its collective operations."""
        if self.error is None:
            arguments = (call.weights,) if call.method == "load" else ()
            try:
                return getattr(self._member.engine, call.method)(call.stage, *arguments)
            except Exception as error:
                self._fail(error)
        met = self.error
        assert met is not None
        if not isinstance(met, GroupError):
            self._skip_stage(call)
        raise met

    def _begin(self, batch: Batch) -> None:
        try:
            self._member.engine.begin(batch)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = error
        if isinstance(error, GroupError):
            self._rounds.record_failure(error)
        else:
            error.add_note(f"on {self.name}, one of engine.devices")

    def _skip_stage(self, call: Call) -> None:
        slots = self._member.slots
        try:
            if call.method == "load":
                slots.reset()  # no slot is in use any more
                slots.load(call.stage, call.weights)
            else:
                slots.skip_stage(call.stage, call.method in ("turn", "backward"))
        except Exception as error:  # the device blocks the other devices
            self._rounds.record_failure(error)

    def _ask(self, question: Callable[[], Any]) -> Any:
        def answer() -> Any:
            if self.error is not None:
                raise self.error
            return question()

        return self._submit(answer).result()

    def _submit(self, act: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future


class _PendingResult:
    """Gradients of a stage that a device has not computed yet."""

    def __init__(self, pending: Future[PendingGradients]) -> None:
        self._pending = pending

    def wait(self) -> list[PartialSum]:
        """Return the sums; raise the device's error."""
        return self._pending.result().wait()


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it refers to the engine, which must be freed
