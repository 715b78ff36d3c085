"""The machine that a run is planned for, as data.

Everything that planning asks of the system is read here, at once; the account of memory and the
choice of the micro-batch take it as an argument, so a run can be planned for another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.engine import target_of, thread_count
from penstock.kernels.processor import Processor
from penstock.telemetry import process_memory


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device's own, in bytes."""

    free: int
    total: int


@dataclass(frozen=True)
class Machine:
    """One host, as one process of a run sees it now.

    Attributes:
        processor: of the host.
        cores: that this process may use.
        resident_bytes: what this process has of host memory: libraries, and what was compiled.
        available_bytes: what it may still take before the system, a control group or a limit of
            the process stops it.
        is_measurable: whether the system says what a process has.
        devices: by name, those that have memory of their own and were asked for.
    """

    processor: Processor
    cores: int
    resident_bytes: int
    available_bytes: int
    is_measurable: bool = True
    devices: Mapping[str, DeviceMemory] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """What this process may have of host memory in all."""
        return self.resident_bytes + self.available_bytes

    def free_bytes(self, devices: Sequence[str]) -> int:
        """Return the least that is free on any of these devices.

        Raises:
            KeyError: a device has no memory of its own, or was not asked for.
        """
        return min(self.devices[name].free for name in devices)

    @classmethod
    def here(cls, devices: Sequence[str] = ()) -> Machine:
        """Read this machine; of its devices those named, since asking one starts its driver."""
        asked = {name: target_of(name).memory_bytes(name) for name in devices}
        return cls(
            processor=Processor.here(),
            cores=thread_count(None),
            resident_bytes=process_memory.resident_bytes(),
            available_bytes=process_memory.available_bytes(),
            is_measurable=process_memory.is_measurable(),
            devices={name: DeviceMemory(*memory) for name, memory in asked.items() if memory},
        )


ReadMachine = Callable[[Sequence[str]], Machine]
"""Reads the machine, with the memory of these devices; `Machine.here`, or one that is made up.

Called again after each compilation: what the process has is measured, not estimated.
"""
