"""The memory budget of the whole process, divided between its parts before the first step.

The sum of all parts stays below `memory`, or below the machine's memory if `memory` is not set. An
impossible division is refused with the size of every part. The memory of the libraries is measured
after all imports and after compilation, not estimated. Engines and shards in processes of this
machine count as parts; those on other hosts do not. By default, an engine on another host may use
as much as a single engine could use here: the hosts of a run are of one kind, and their number must
not change the work of one host.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from penstock.config import Config, size_above, sizes_and_limit
from penstock.engine import (
    KEPT_OVER_USED,
    EnginePlan,
    Sharing,
    bytes_of_choice,
    mask_staging_bytes,
    plan_engine,
    predict_bytes,
    target_of,
)
from penstock.errors import BudgetError, ConfigError
from penstock.planning.machine_limits import Machine
from penstock.planning.memory_shares import HostCapacity, MemoryShares
from penstock.planning.relays import relay_count
from penstock.planning.store_factory import (
    assembly_of,
    dram_store_bytes,
    early_bytes,
    least_flash_store_bytes,
    mask_change_bytes,
)
from penstock.planning.transfer_memory import (
    computes_dense_gradients,
    largest_moved,
    shared_memory_bytes,
    transfer_buffer_bytes,
)
from penstock.program import Program, WeightSpec, largest_stage
from penstock.store import Role, room_of

RESERVE_BYTES = 128 << 20
"""Memory outside all parts: machine code of kernels, scratch of products, Python itself."""

_SAVING_BYTES = 48 << 20  # buffers of the checkpoint writer
_CHECKING_BYTES = 16 << 20  # of a data set, whose chunks are checked one at a time
_COPIES_OF_BATCH = 3  # as drawn, as tensors, as the engine's inputs
_AUTO_ENGINE, _AUTO_FLASH = 0.5, 0.25  # of free memory, where no cap is set
_AUTO_DEVICE = 0.85  # of a device's own free memory; libraries and fragments need the rest
# Private memory of forked processes (`/proc/PID/smaps_rollup`, Private_Dirty, PyTorch 2.13 for
# CPUs). The fork server has 315 MiB. An engine or shard has 80 MiB after its first steps with 4
# stages, 102 MiB with 26 stages. A spare engine has 27 MiB less.
_TEMPLATE_BYTES = 320 << 20
_FORKED_BYTES, _FORKED_STAGE_BYTES = 76 << 20, 1 << 20


class Budget:
    """Divides the memory of a process between the parts of one run. Created after compilation.

    **Arguments:** `micro_batches` are those of one engine. `roles` are the optimizer's state
    tensors. `machine` is the host of the engines, with the memory of the device. `devices` are
    those of a group, if the engines form a group.

    **Raises:** `BudgetError` if no memory is left for engines, however small a step is.
    """

    def __init__(
        self,
        config: Config,
        program: Program,
        micro_batches: int,
        device: str,
        roles: Sequence[Role],
        machine: Machine,
        devices: Sequence[str] = (),
        sharing: Sharing | None = None,
    ) -> None:
        self._config, self._program, self._device = config, program, device
        self._target, self._machine = target_of(device), machine
        self._devices, self._sharing = devices or (device,), sharing
        self._roles = roles
        self._micro_batches = micro_batches
        self._libraries = machine.resident_bytes
        if config.memory is not None and not machine.is_measurable:
            raise ConfigError(
                "memory: expected null, since this system does not report the memory of a process; "
                "set store.dram and engine.memory instead"
            )
        self._limit = machine.memory_bytes
        if config.memory is not None:
            self._limit = min(int(config.memory), self._limit)
        inputs = [program.values[n].tensor for n in program.inputs if n in program.values]
        batch_bytes = sum(i.bytes * config.batch.size // i.shape[0] for i in inputs)
        self._data = _CHECKING_BYTES + _COPIES_OF_BATCH * batch_bytes
        self._on_flash = config.store.flash.path is not None
        if self._on_flash:
            self._need = least_flash_store_bytes(config, program)
        else:
            self._need = dram_store_bytes(config, program)
        self._transfer_bytes = 0
        if config.cluster.start != "none":
            dense = computes_dense_gradients(config)
            self._transfer_bytes = transfer_buffer_bytes(program, device, dense)
        self._is_elsewhere = config.cluster.shards == "apart" and config.cluster.has_other_hosts
        self._engines_here = 0 if config.cluster.has_other_hosts else config.engines
        self._saving = _SAVING_BYTES
        if not self._on_flash and config.cluster.shards == "here":
            self._saving += min(int(config.checkpoint.buffer), self._need)
        self._connections = shared_memory_bytes(config, program)
        self._process = self._process_bytes()
        self._processes = self._processes_bytes()
        known = self._libraries + self._data + self._saving + self._connections + RESERVE_BYTES
        known += self._processes
        self._rest = self._limit - known
        if self._here(self._need) >= self._rest:
            given = config.store.dram if self._on_flash else "auto"
            self._refuse(self._need if given == "auto" else max(self._need, given), self._least())

    def room(self, shares: MemoryShares) -> HostCapacity | None:
        """Return the limit on the number of engines; None if engines are on other hosts."""
        if not self._engines_here:
            return None
        one = shares.engine_host + self._process
        here = self._limit - self._rest - self._engines_here * self._process
        return HostCapacity(self._limit, here + self._here(shares.store), one)

    @property
    def _are_forked(self) -> bool:
        return self._config.cluster.start == "local" and self._target.survives_fork

    def _process_bytes(self) -> int:
        """Return the initial memory of one worker process of this machine."""
        cluster = self._config.cluster
        if cluster.start == "none" or cluster.has_other_hosts:
            return 0
        if not self._are_forked:
            return self._libraries
        return _FORKED_BYTES + _FORKED_STAGE_BYTES * len(self._program.stages)

    def _processes_bytes(self) -> int:
        """Return the initial memory of all worker processes of this machine.

        A spare worker adds no engine memory: it computes only after another engine, and its memory,
        is gone.
        """
        config = self._config
        if not self._process:
            return 0
        workers = config.engines + config.cluster.spare + relay_count(config)
        workers += config.store.holders if config.cluster.shards == "apart" else 0
        return workers * self._process + (_TEMPLATE_BYTES if self._are_forked else 0)

    def _here(self, store: int) -> int:
        """Return the part of the store's memory that is on this machine.

        For shards on other hosts this is the memory of an RPC: one stage, in pieces and assembled.
        """
        if not self._is_elsewhere:
            return store
        return 2 * largest_moved(self._program) + assembly_of(self._config, self._program)

    def engine_bytes(self) -> int:
        """Return the budget of one engine.

        **Raises:** `BudgetError` if the other parts leave no memory.
        """
        config, count, rest = self._config, max(1, self._engines_here), self._rest
        if config.engine.memory != "auto":
            return int(config.engine.memory)
        if self._target.has_own_memory:
            least = self._machine.free_bytes(self._devices)
            on_one = count if config.cluster.start == "local" else 1  # processes on one device
            return int(least * _AUTO_DEVICE) // on_one
        if not self._engines_here:  # as for one engine, with its connections only
            alone = config.model_copy(update={"engines": 1})
            rest += self._connections - shared_memory_bytes(alone, self._program)
        store = self._need
        if self._on_flash:
            store = int(_AUTO_FLASH * rest)
        if config.store.dram != "auto" and self._on_flash:
            store = int(config.store.dram)
        is_too_little = store < self._need
        store = self._here(store)
        if config.memory is None:
            share = int(_AUTO_ENGINE * (rest - store)) // count
            if share <= 0:
                self._refuse(store, self._least())
            return share
        if self._on_flash and config.store.dram == "auto" and not self._is_elsewhere:
            # Engines and store start with half each; the store gets memory that engines cannot use.
            least, wanted = self._choice()
            share = min(max(least, min(rest // 2, rest - self._need) // count), wanted)
            store = rest - count * share
            is_too_little = store < self._need
        share = (rest - store) // count
        if share <= 0 or is_too_little:
            self._refuse(max(self._need, store), self._least())
        return share

    def plan(self, engine_bytes: int) -> EnginePlan:
        """Choose the stages to recompute (`plan_engine`), within the budget of one engine."""
        config = self._config
        try:
            plan = plan_engine(
                self._program,
                self._micro_batches,
                engine_bytes,
                config.engine.recompute,
                self._device,
                self._sharing,
                self._beside,
                computes_dense_gradients(config),
                # Exact if the engines share the batch; 1 if a plan asks what one of them could do.
                max(
                    1, config.batch.size // max(1, self._program.micro_batch * self._micro_batches)
                ),
            )
            return replace(plan, cuda_graphs=config.engine.cuda_graphs)
        except BudgetError:
            is_divided = config.memory is not None and config.engine.memory == "auto"
            if not is_divided or self._target.has_own_memory or not self._engines_here:
                raise
            self._refuse(self._rest - self._engines_here * engine_bytes, self._least())

    def divide(self, plan: EnginePlan, engine_bytes: int) -> MemoryShares:
        """Return the memory of every part, given the expected use of the engines.

        **Raises:** `BudgetError` if the sum exceeds the limit.
        """
        config = self._config
        peak = self._peak_bytes(plan)
        one = self._host_bytes(peak)
        engines = self._engines_here * one + self._returns_bytes(plan)
        shown = -(-engines // max(1, self._engines_here))
        kept = int(engines * KEPT_OVER_USED)
        store = self._need
        if self._on_flash:
            left = self._rest - kept
            if config.memory is None:
                left = int(_AUTO_FLASH * self._rest)
            store = left if config.store.dram == "auto" else int(config.store.dram)
        if config.store.dram == "auto":
            store = max(store, self._need)  # a share of free memory may be too small
        if self._here(store) + engines > self._rest:
            self._refuse(store, shown)
        self._require_loading(store, shown)
        early = early_bytes(config, self._program, self._device)
        if not self._fits_early(store + early, engines):
            early = 0
        store += early
        count = max(1, self._engines_here)
        spare = self._rest - self._here(store) - max(one, engines)
        most = one + max(0, min(one, spare // count))
        inference = engine_bytes
        if config.cluster.start == "none" and not self._target.has_own_memory:
            inference = max(one, min(engine_bytes, self._rest - self._here(store)))
        changes_here = config.cluster.shards == "here"
        return MemoryShares(
            engine=engine_bytes,
            engine_peak=peak,
            engine_host=one,
            engines=engines,
            store=store,
            engine_most=most,
            inference=inference,
            limit=self._limit - self._saving,
            mask_change=mask_change_bytes(config, self._program) if changes_here else 0,
            early=early,
        )

    def _fits_early(self, store: int, engines: int) -> bool:
        """Return whether there is room for a store with memory for early weights."""
        dram = self._config.store.dram
        is_below = dram == "auto" or store <= int(dram)
        return is_below and self._here(store) + engines <= self._rest

    def parts(self, shares: MemoryShares) -> dict[str, int]:
        """Return the memory of this host by part, for a division that fits."""
        here = max(1, self._engines_here)
        return dict(self._parts(shares.store, -(-shares.engines // here)))

    @property
    def limit_bytes(self) -> int:
        """The memory that all parts together may use."""
        return self._limit

    def _peak_bytes(self, plan: EnginePlan) -> int:
        """Return one engine's use of the memory in which it computes."""
        program, micro_batches = self._program, self._micro_batches
        return predict_bytes(program, micro_batches, plan, self._device, self._sharing).peak_bytes

    def _host_bytes(self, peak: int) -> int:
        """Return one engine's host memory: all of its memory, or its copy buffers and masks that
        are on their way to the device."""
        if not self._target.has_own_memory:
            return peak
        masks = mask_staging_bytes(self._program)
        if self._sharing is not None:
            return masks
        moved = largest_moved(self._program, computes_dense_gradients(self._config))
        return 2 * moved + self._transfer_bytes + masks

    def _returns_bytes(self, plan: EnginePlan) -> int:
        """Return the host memory of all devices of a group together."""
        if self._sharing is None:
            return 0
        return plan.slots * self._sharing.return_bytes(self._program)

    def _least(self) -> int:
        return self._choice()[0]

    def _choice(self) -> tuple[int, int]:
        return bytes_of_choice(
            self._program,
            self._micro_batches,
            self._config.engine.recompute,
            self._device,
            self._sharing,
            self._beside,
            computes_dense_gradients(self._config),
        )

    @property
    def _beside(self) -> int:
        """The transfer buffers, if they are in the memory in which engines compute."""
        return 0 if self._target.has_own_memory else self._transfer_bytes

    def _require_loading(self, store: int, engine: int) -> None:
        """Check the memory for loading a flash store: one stage's weights and state together."""
        if not self._on_flash:
            return
        name, need = largest_stage(self._program, self._loading_bytes)
        if need > self._rest:
            raise BudgetError(
                f"{self._limit_name}: gathering the weights and the state of {name} needs "
                f"{size_above(need)} once, {size_above(max(self._rest, 0))} are left beside the "
                f"libraries and the reserve.\n{self._table(store, engine)}\nRaise memory by "
                f"{size_above(need - self._rest)}."
            )

    def _loading_bytes(self, weight: WeightSpec) -> int:
        """Return the memory of a weight, in its source and its stored format, and of its state."""
        roles = self._roles if weight.trainable else ()
        state = sum(room_of(weight, role.group) * role.numpy.itemsize for role in roles)
        return weight.entries * weight.format.width + state + 4 * weight.elements

    @property
    def _limit_name(self) -> str:
        config = self._config
        if config.memory is not None and self._limit == int(config.memory):
            return f"memory: {config.memory}"
        return f"this machine has {sizes_and_limit([], self._limit)[0]} for this process, which"

    def _refuse(self, store: int, engine: int) -> NoReturn:
        raise BudgetError(
            f"{self._limit_name} cannot hold this run:\n{self._table(store, engine)}\n"
            f"{self._advice(store, engine)}"
        )

    def _parts(self, store: int, engine: int) -> list[tuple[str, int]]:
        where = "store, on flash besides (store.dram)" if self._on_flash else "store"
        if self._is_elsewhere:
            where = "calls to the store's shards, on other hosts"
        here = self._engines_here
        number = f"{here} engines" if here > 1 else "engine"
        workers = "worker processes, with standby engines and relays"
        shared = "memory that processes share (cluster.shared_memory)"
        return [
            ("libraries and compiled model, measured", self._libraries),
            ("batches and checks of the data set", self._data),
            ("writing checkpoints (checkpoint.buffer)", self._saving),
            (where, self._here(store)),
            *([(f"{number} (engine.memory)", here * engine)] if here else []),
            *([(shared, self._connections)] if self._connections else []),
            *([(workers, self._processes)] if self._processes else []),
            ("reserve for memory of no other part", RESERVE_BYTES),
        ]

    def _table(self, store: int, engine: int) -> str:
        parts = self._parts(store, engine)
        names, sizes = zip(*parts, strict=True)
        shown = sizes_and_limit([*sizes, sum(sizes)], self._limit)
        rows = zip([*names, "sum", "limit"], shown, strict=True)
        width = max(42, *map(len, names))
        return "\n".join(f"  {name:{width}} {size:>12}" for name, size in rows)

    def _advice(self, store: int, engine: int) -> str:
        """Return the configuration keys to change, with their values: only those that help."""
        total = sum(size for _, size in self._parts(store, engine))
        over = total - self._limit
        above, *_ = sizes_and_limit([over, total], self._limit)  # in the unit of the table
        ways = self._resized(store, engine, total)
        flash, batch = self._freed_by_flash(store), self._freed_by_batch(engine)
        use_flash = "set store.flash.path to a folder on a fast disk"
        micro = "" if self._program.micro_batch == 1 else "batch.micro, "
        smaller_batch = f"lower {micro}batch.size or data.sequence_length"
        if (hosts := self._hosts_of_shards(store, total)) is not None:
            ways.append(
                f"divide the store between {hosts} hosts or more with store.shards: {hosts} and "
                "cluster.shards: apart"
            )
        if flash >= over:
            ways.append(use_flash)
        if batch > over:
            ways.append(smaller_batch)
        elif 0 < over - batch < flash < over:
            ways.append(f"{use_flash} and {smaller_batch}")
        if not ways:
            ways.append("use a machine with more memory")
        return f"The sum is {above} above the limit: {', or '.join(ways)}."

    def _resized(self, store: int, engine: int, total: int) -> list[str]:
        """Return the sizes whose change alone makes the run fit."""
        config, here, over = self._config, self._engines_here, total - self._limit
        ways = []
        if config.memory is not None and int(config.memory) < total <= self._machine.memory_bytes:
            least, *_ = sizes_and_limit([total], self._limit)
            ways.append(f"raise memory above {least}")
        is_given = self._on_flash and config.store.dram != "auto" and not self._is_elsewhere
        if is_given and (store - over) >> 20 << 20 >= self._need:
            ways.append(f"lower store.dram to {_floor(store - over)}")
        share = (here * engine - over) // here if here else 0
        if engine > share >= self._least():
            ways.append(f"lower engine.memory to {size_above(share)}")
        buffer = self._saving - _SAVING_BYTES
        if buffer - over >= 1 << 20:
            ways.append(f"lower checkpoint.buffer to {_floor(buffer - over)}")
        return ways

    def _hosts_of_shards(self, store: int, total: int) -> int | None:
        """Return the number of hosts of this size that could hold the store in shards; None if it
        is in shards already, all hosts are this one, or other parts do not fit."""
        config = self._config
        buffer = self._saving - _SAVING_BYTES  # which belongs to a store in this process
        left = self._limit - (total - store - buffer)
        if config.store.shards > 1 or not config.cluster.has_other_hosts or left <= 0:
            return None
        return max(2, -(-store // left))

    def _freed_by_flash(self, store: int) -> int:
        """Return the memory of this host that a store on flash would not need."""
        if self._on_flash or self._is_elsewhere:
            return 0
        least = least_flash_store_bytes(self._config, self._program)
        return store - least + self._saving - _SAVING_BYTES

    def _freed_by_batch(self, engine: int) -> int:
        """Return more than the memory of this host that any smaller batch would free."""
        here = 0 if self._target.has_own_memory else self._engines_here
        return here * engine + self._data - _CHECKING_BYTES


def _floor(size: int) -> str:
    return f"{size >> 20}MiB"
