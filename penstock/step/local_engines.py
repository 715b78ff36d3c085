"""The engines of this process: on one device, or on several devices as a group (`engine.devices`).

Each device of a group has a thread in this process. Every device reads the store's memory in place,
an error is an exception, and nothing outlives the run. The threads contend for Python's lock only
to launch operations; copies, waits and computation release the lock.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.collectives import DeviceRendezvous, Fabric, GroupFabric, LocalFabric
from penstock.config import Config, EngineConfig
from penstock.engine import (
    DeviceThread,
    Engine,
    EnginePlan,
    Member,
    Rounds,
    SharedSlots,
    Sharing,
    SparseWeights,
    accelerators,
    end_setting,
    set_threads,
    target_of,
)
from penstock.errors import ConfigError
from penstock.kernels.memory import allocate, page_lock
from penstock.planning import ExecutionPlan, builders, settle_pages
from penstock.program import Program


def choose_devices(config: EngineConfig) -> tuple[str, ...]:
    """Return the devices of the group that a run requests; empty if it requests no group.

    The first device becomes the current device of this thread.

    Raises:
        ConfigError: this machine lacks these devices.
    """
    if config.devices is None:
        return ()
    there = accelerators()
    if config.devices == "all" and not there:
        raise ConfigError(
            "engine.devices: all means all GPUs, but this machine has none; remove the key to "
            "compute on the CPU"
        )
    names = there if config.devices == "all" else config.devices
    missing = [name for name in names if name not in ("cpu", *there)]
    if missing:
        raise ConfigError(
            f"engine.devices: this machine has {', '.join(there) or 'no GPU'}, got "
            f"{', '.join(missing)}"
        )
    target_of(names[0]).make_current(names[0])
    return names


def counted(config: Config, devices: Sequence[str]) -> Config:
    """Return a configuration with one engine for each device of a group."""
    return config.model_copy(update={"engines": len(devices)}) if devices else config


class LocalEngines(Protocol):
    """The engines of this process, and their fabric."""

    engines: list[Engine]
    fabric: Fabric

    def close(self) -> None:
        """Release the devices."""
        ...


def make_local_engines(
    config: Config, layout: ExecutionPlan, devices: Sequence[str], device: str
) -> LocalEngines:
    """Create the engines of this process.

    With `devices` they form a group; otherwise the configured number of engines take turns on
    `device`.
    """
    pages = 0
    if not target_of(device).has_own_memory:
        pages = settle_pages(layout.shares, are_at_once=bool(devices))
    try:
        if devices:
            return DeviceGroup(
                layout.program,
                layout.plan,
                devices,
                micro_batches=layout.micro_batches,
                budget_bytes=layout.budget_bytes,
                threads=config.engine.threads,
                sparse=layout.sparse_weights,
                pages=pages,
            )
        engines = builders.make_engines(
            layout.program,
            layout.plan,
            layout.shares,
            config.engines,
            device,
            layout.sparse_weights,
        )
    except BaseException:
        end_setting(pages)
        raise
    return SingleDevice(engines, pages)


class SingleDevice:
    """Engines that take turns on one device. `pages` is the number of their setting of pages."""

    def __init__(self, engines: list[Engine], pages: int = 0) -> None:
        self.engines = engines
        self.fabric: Fabric = LocalFabric(len(engines))
        self._pages = pages

    def close(self) -> None:
        """Release the memory of recorded steps, and end the setting of pages."""
        end_setting(self._pages)
        for engine in self.engines:
            engine.release()


class DeviceGroup:
    """The engines of a group, and their fabric.

    Args:
        devices: as `choose_devices` returns them.
        micro_batches: of a step.
        budget_bytes: of one device.
        threads: CPU threads of one engine (`engine.threads`).
        sparse: the layouts and choices of sparse weights, which the engines share.
        pages: the number of their setting of pages.

    Raises:
        GroupError: the devices cannot connect to each other.
    """

    def __init__(
        self,
        program: Program,
        plan: EnginePlan,
        devices: Sequence[str],
        *,
        micro_batches: int,
        budget_bytes: int | None,
        threads: int | None,
        sparse: SparseWeights | None = None,
        pages: int = 0,
    ) -> None:
        self._program, self._plan, self._pages = program, plan, pages
        self._budget_bytes, self._threads = budget_bytes, threads
        self._sparse = sparse
        self._sharing = Sharing(len(devices), micro_batches, plan.dense_gradients)
        self._meeting = DeviceRendezvous(target_of(devices[0]).collectives, len(devices))
        self._returns = self._make_returns()
        self._rounds = Rounds(self._meeting.abort)
        members = [
            DeviceThread(
                f"device {rank} ({name})",
                functools.partial(self._member, rank, name),
                self._rounds,
            )
            for rank, name in enumerate(devices)
        ]
        self.engines: list[Engine] = [*members]
        self.fabric: Fabric = GroupFabric(len(devices))
        try:
            for member in members:
                member.start()
        except BaseException:
            self._meeting.abort()
            self.close()
            raise

    def close(self) -> None:
        """End the devices' threads and the setting of pages."""
        end_setting(self._pages)
        self._rounds.close()
        self.fabric.close()

    def _make_returns(self) -> list[torch.Tensor]:
        """Return the host buffers through which the sums of all devices go to the store."""
        size = self._sharing.return_bytes(self._program)
        buffers = [allocate(size) for _ in range(self._plan.slots)]
        for memory in buffers:
            page_lock(memory)  # without page locking, copies do not overlap but are correct
        return [torch.from_numpy(memory) for memory in buffers]

    def _member(self, rank: int, name: str) -> Member:
        """Create the parts of one device, in the device's own thread."""
        target = target_of(name)
        target.make_current(name)
        set_threads(self._threads)  # Numba's thread count is per thread
        peers = self._meeting.join(rank)
        lanes = target.make_lanes(name)
        slots = SharedSlots(
            self._program,
            self._plan.slots,
            lanes,
            self._sharing,
            peers,
            self._returns,
            target.make_masks(lanes),
        )
        constants = {n: value.to(name) for n, value in self._program.constants.items()}
        engine = target.make_engine(
            dataclasses.replace(self._program, constants=constants),
            self._plan,
            device=name,
            budget_bytes=self._budget_bytes,
            slots=slots,
            sparse=self._sparse,
        )
        return Member(engine, slots, peers.leave)
