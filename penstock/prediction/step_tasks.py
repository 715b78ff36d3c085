"""A step as tasks of an event model: who does what, and what waits for what.

There are two arrangements. On a host whose processor is the engine, one thread fetches, computes
and receives in turn, and only the flash store's threads work beside it. Otherwise the store, the
links and the engine are lanes of their own: the weights of the next stages are on their way while a
stage computes, and gradients return meanwhile. All engines do the same at the same time, so one of
them stands for all. The updates of a step run in the forward sweep of the next, so several steps
are simulated and the last one is reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.distributed.protocol import CHUNK_BYTES
from penstock.machines import LinkPart, MachineDescription, Work
from penstock.prediction.operation_times import OperationCost, StepCosts
from penstock.prediction.task_simulation import Task
from penstock.store.flash import FlashForecast

_ALL_CORES: Mapping[str, float] = {"cores": 1.0}
_CHUNKS = 4  # into which the memory for state in transit is divided: reading, updating, writing


@dataclass(frozen=True)
class Arrangement:
    """Where the work of a step is done.

    Attributes:
        machine: the machine.
        engines: number of engines.
        slots: stages whose weights an engine holds at once.
        depth: nodes of the fabric between store and engine.
        shares_cores: whether engines and store are processes of one host.
        messages: how these processes send: `shared memory` or `socket`.
        threads: of one engine; None: as many as cores.
    """

    machine: MachineDescription
    engines: int = 1
    slots: int = 2
    depth: int = 0
    shares_cores: bool = False
    messages: Work = "shared memory"
    threads: int | None = None

    @property
    def at_once(self) -> float:
        """How long engines that share the cores take, over one after the other."""
        processes, cores = self.machine.processes, self.machine.store.cores
        is_crowded = self.shares_cores and self.engines * (self.threads or cores) > cores
        if not is_crowded or processes is None:
            return 1.0
        return processes.at_once or 1.0

    @property
    def is_one_thread(self) -> bool:
        """Whether one thread does the work of store and engine in turn."""
        return self.machine.engine.is_host and not self.shares_cores


@dataclass
class StepTasks:
    """Builds the tasks of consecutive steps.

    **Arguments:** `flash` is the traffic of a store on flash.
    """

    costs: StepCosts
    arrangement: Arrangement
    flash: FlashForecast | None = None
    tasks: list[Task] = field(default_factory=list)

    def build(self, steps: int) -> list[Task]:
        """Return the tasks of so many steps."""
        self._commit: tuple[int, ...] = ()
        self._written: list[int] = []  # the tasks that wrote chunks of state, in order
        self._spilled: dict[int, int] = {}  # by stage, the task that wrote its gradient
        self._ready: dict[tuple[int, int], list[int]] = {}  # reads, by step and operation
        for step in range(1, steps + 1):
            self._step(step)
        return self.tasks

    def _add(
        self, lane: str, what: str, seconds: float, after: Sequence[int], **more: object
    ) -> int:
        self.tasks.append(Task(lane, what, seconds, tuple(after), **more))  # type: ignore[arg-type]
        return len(self.tasks) - 1

    def _step(self, step: int) -> None:
        computed: list[int] = []
        received: int | None = None
        held: int | None = None  # the operation whose gradients are not received yet
        operations = self.costs.operations
        for number, cost in enumerate(operations):
            if self.flash is None:
                ready = self._update(step, number, cost)
            else:
                self._flash_reads(step, number, computed)
                ready = self._flash_updates(step, number) + self._ready.pop((step, number), [])
            loaded = self._load(step, number, cost, ready, computed)
            computed.append(self._compute(step, number, cost, loaded))
            if held is not None:
                received = self._receive(step, held, operations[held], computed[held])
            held = number if cost.gradient_bytes else None
        if held is not None:
            received = self._receive(step, held, operations[held], computed[held])
        last = [computed[-1]] if received is None else [computed[-1], received]
        self._commit = (self._add(self._store_lane, "commit", 0.0, last, step=step),)

    # --- the store ------------------------------------------------------------------------------

    @property
    def _store_lane(self) -> str:
        return "processor" if self.arrangement.is_one_thread else "store"

    @property
    def _cores(self) -> Mapping[str, float]:
        return _ALL_CORES if self.arrangement.machine.engine.is_host else {}

    def _update(self, step: int, number: int, cost: OperationCost) -> list[int]:
        """Apply the pending updates of an operation's weights; none before the first commit."""
        seconds = sum(self.costs.update_seconds[name] for name in cost.updated)
        if not seconds or step == 1:
            return list(self._commit)
        more = {"step": step, "op": number, "uses": self._cores}
        return [self._add(self._store_lane, "update", seconds, self._commit, **more)]

    def _load(
        self, step: int, number: int, cost: OperationCost, ready: list[int], computed: list[int]
    ) -> list[int]:
        """Send the weights of an operation once an engine has a free slot for them."""
        link = self.arrangement.machine.link
        uses: Mapping[str, float] = {}
        if link is None:
            if not self.arrangement.shares_cores:
                return ready
            seconds, uses = self._message(cost.weight_bytes)
        else:
            seconds = cost.weight_bytes / _link_rate(link, self.arrangement.engines, link.weights)
            seconds += self.arrangement.depth * link.seconds
        slot = number - self.arrangement.slots
        free = [computed[slot]] if slot >= 0 else list(self._commit)
        more = {"step": step, "op": number, "bytes": cost.weight_bytes, "uses": uses}
        return [self._add("weights", "weights", seconds, [*ready, *free], **more)]

    def _compute(self, step: int, number: int, cost: OperationCost, loaded: list[int]) -> int:
        lane = "processor" if self.arrangement.is_one_thread else "engine"
        seconds = cost.compute_seconds
        if self.arrangement.shares_cores or self.arrangement.is_one_thread:
            seconds *= self.arrangement.engines * self.arrangement.at_once
        more = {"step": step, "op": number, "uses": self._cores}
        return self._add(lane, cost.operation.sweep, seconds, loaded, **more)

    def _receive(self, step: int, number: int, cost: OperationCost, computed: int) -> int:
        """Return the sum of an operation's gradients to the store."""
        more = {"step": step, "op": number, "bytes": cost.gradient_bytes}
        link, before = self.arrangement.machine.link, computed
        if link is not None:
            seconds = cost.gradient_bytes / _link_rate(
                link, self.arrangement.engines, link.gradients
            )
            seconds += self.arrangement.depth * link.seconds
            before = self._add("gradients", "gradients", seconds, [computed], **more)
        elif self.arrangement.shares_cores:
            sent, uses = self._message(cost.gradient_bytes)
            before = self._add("gradients", "gradients", sent, [computed], uses=uses, **more)
        own = {**more, "uses": self._cores}
        done = self._add(self._store_lane, "receive", cost.receive_seconds, [before], **own)
        if self.flash is not None:
            self._spill(step, number, cost, done)
        return done

    def _message(self, size: int) -> tuple[float, Mapping[str, float]]:
        """Return the seconds in which every engine, a process of this host, receives or sends so
        many bytes, and the share of the processes' links that this uses."""
        machine, engines = self.arrangement.machine, self.arrangement.engines
        processes = machine.processes
        if processes is None:
            return engines * size / machine.store.speed.curve("copy").at(size or 1), {}
        rate = processes.speed.curve(self.arrangement.messages).at(min(size or 1, CHUNK_BYTES))
        uses = {"messages": rate / processes.both} if processes.both else {}
        return engines * (size / rate + processes.seconds), uses

    # --- flash ----------------------------------------------------------------------------------

    def _disk_task(self, lane: str, size: int, after: Sequence[int], step: int, op: int) -> int:
        """Read or write; both together may be slower than each alone."""
        flash = self.arrangement.machine.store.flash
        assert flash is not None
        work: Work = "flash write" if lane == "flash write" else "flash read"
        rate = flash.speed.curve(work).at(size or 1)
        seconds = size / rate
        # The thread that reads weights verifies them too; the updater verifies the state.
        total = seconds + (self._check_seconds(size) if lane == "flash weights" else 0.0)
        share = seconds / total if total else 1.0
        uses = {work: share} | ({"disk": share * rate / flash.both} if flash.both else {})
        return self._add(lane, work, total, after, step=step, op=op, bytes=size, uses=uses)

    def _check_seconds(self, size: int) -> float:
        """Return the seconds of the checksums of so many bytes of flash."""
        return size / self.arrangement.machine.store.speed.curve("checksum").at(size or 1)

    def _flash_updates(self, step: int, number: int) -> list[int]:
        """Read, update and write the state of an operation's weights; return the updates.

        The state passes through a window of memory in chunks: a chunk is read when an earlier one
        has been written. What fits into the window is read before the step begins.
        """
        assert self.flash is not None
        done: list[int] = []
        if step == 1 or not self.costs.operations[number].updated:
            return done
        stage = self.costs.operations[number].operation.stage
        for update in (u for u in self.flash.updates if u.stage == stage):
            seconds = sum(self.costs.update_seconds[name] for name in update.names)
            seconds += self._check_seconds(
                update.state_read + update.gradient_read + update.written
            )
            moved = max(update.state_read, update.written)
            pieces = max(1, -(-moved * _CHUNKS // max(self.flash.window_bytes, 1)))
            read = (update.state_read + update.gradient_read) // pieces
            spilled = [self._spilled[stage]] if update.gradient_read else []
            for _ in range(pieces):
                waits = [*self._written[-_CHUNKS:][:1], *spilled]
                begun = list(self._commit)
                if read:
                    begun.append(self._disk_task("flash state", read, waits, step, number))
                more = {"step": step, "op": number, "uses": self._cores}
                done.append(self._add("updater", "update", seconds / pieces, begun, **more))
                out = update.written // pieces
                self._written.append(self._disk_task("flash write", out, done[-1:], step, number))
        return done

    def _flash_reads(self, step: int, number: int, computed: list[int]) -> None:
        """Read the weights for which there is room once the operation before this one is done."""
        assert self.flash is not None
        after = computed[-1:] or list(self._commit)
        for read in self.flash.weights:
            if read.room == number:
                got = self._disk_task("flash weights", read.bytes, after, step, read.needed)
                when = step + (read.needed < read.room)
                self._ready.setdefault((when, read.needed), []).append(got)

    def _spill(self, step: int, number: int, cost: OperationCost, received: int) -> None:
        """Write gradients that do not stay in memory."""
        assert self.flash is not None
        stage = cost.operation.stage
        size = sum(u.gradient_written for u in self.flash.updates if u.stage == stage)
        if size:
            self._spilled[stage] = self._disk_task("flash write", size, [received], step, number)


def _link_rate(link: LinkPart, engines: int, own: float) -> float:
    """Return the bytes per second that reach every engine at once, or return from them.

    A fabric that broadcasts sends each byte out of the store once. Peers of one host take a part
    each and gather the rest from each other. Otherwise the store sends each byte to each engine.
    """
    copies = engines if link.fan_out is None and link.peers is None else 1
    if link.peers is not None and engines > 1:
        own = min(own * engines, link.peers)
    return own if link.store is None else min(own, link.store / copies)
