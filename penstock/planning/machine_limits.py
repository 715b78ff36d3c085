"""The machine for which a run is planned, as data.

All queries of the operating system for planning are here. The memory budget and the choice of the
micro-batch receive a `Machine` as an argument, so a run can be planned for another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.engine import return_free_pages, target_of, thread_count
from penstock.kernels.processor import Processor
from penstock.telemetry import process_memory


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device that has its own memory, in bytes."""

    free: int
    total: int


@dataclass(frozen=True)
class Machine:
    """The current state of one host, as seen by one process of a run.

    Attributes:
        processor: of the host.
        cores: the number of cores that this process may use.
        resident_bytes: resident host memory of this process: libraries and compiled programs.
        available_bytes: memory that this process can still allocate before the system, a control
            group or a limit of the process stops it; below 0 on a described machine that has less
            than `resident_bytes`.
        is_measurable: whether the system reports the resident memory of a process.
        devices: the requested devices that have memory of their own, by name.
        micro_batch_tokens: tokens of a micro-batch beyond which products are no faster; None: those
            of the target.
    """

    processor: Processor
    cores: int
    resident_bytes: int
    available_bytes: int
    is_measurable: bool = True
    devices: Mapping[str, DeviceMemory] = field(default_factory=dict)
    micro_batch_tokens: int | None = None

    @property
    def memory_bytes(self) -> int:
        """The total host memory that this process may use."""
        return self.resident_bytes + self.available_bytes

    def free_bytes(self, devices: Sequence[str]) -> int:
        """Return the least free memory of any of these devices.

        Raises:
            KeyError: a device has no memory of its own, or was not requested.
        """
        return min(self.devices[name].free for name in devices)

    def holding(self, resident_bytes: int) -> Machine:
        """Return the same machine as seen by a process that has so much resident memory."""
        available = self.memory_bytes - resident_bytes
        return replace(self, resident_bytes=resident_bytes, available_bytes=available)

    @classmethod
    def here(cls, devices: Sequence[str] = ()) -> Machine:
        """Read this machine and the named devices; a query of a device starts its driver.

        Free pages, such as those of an earlier run in this process, are returned before.
        """
        return_free_pages()
        reported = {name: target_of(name).memory_bytes(name) for name in devices}
        return cls(
            processor=Processor.here(),
            cores=thread_count(None),
            resident_bytes=process_memory.resident_bytes(),
            available_bytes=process_memory.available_bytes(),
            is_measurable=process_memory.is_measurable(),
            devices={name: DeviceMemory(*memory) for name, memory in reported.items() if memory},
        )


ReadMachine = Callable[[Sequence[str]], Machine]
"""Reads the machine and the memory of these devices: `Machine.here`, or a stand-in.

Called again after each compilation: the resident memory is measured, not estimated.
"""
