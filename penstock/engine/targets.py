"""The targets of a run: one registry of compute devices by name.

A target contains everything that depends on the kind of device: the tracing device of stages, the
library for matrix products, the construction of an engine, the location of its memory, and the
start of its processes. Other parts call `target_of(name)` and never compare the name. A device is
named after its target, with a number if a host has several of them ("cuda:1").

Engines are imported where one is made: a command that only plans needs none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from penstock.compiler import PRODUCTS, Products, has_onednn, products_for, uses_onednn
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.expanded_weights import DeviceMasks
    from penstock.engine.interface import Engine, EnginePlan
    from penstock.engine.lanes import Lanes
    from penstock.engine.slots import DeviceSlots, WeightSlots
    from penstock.engine.sparse_weights import SparseWeights
    from penstock.kernels.processor import Processor
    from penstock.program import Program


@dataclass(frozen=True)
class EngineParts:
    """What an engine gets besides its program and plan.

    Attributes:
        device: a device of the target; None: the current one.
        budget_bytes: limit of its memory.
        slots: the path of weights and gradients, if it is not the device's default.
        sparse: the layouts and choices of sparse weights, for a program with such on a target that
            does not expand them; the engines of a process share them.
    """

    device: str | None = None
    budget_bytes: int | None = None
    slots: WeightSlots | None = None
    sparse: SparseWeights | None = None


class Target(ABC):
    """A kind of device.

    Attributes:
        name: as in `engine.device`, and before the colon in `engine.devices`.
        trace_device: PyTorch's device on whose (fake) tensors stages are traced.
        products: who may multiply matrices (`compiler/product_libraries.py`), the default first.
        has_own_memory: weights are copied to the device; otherwise they are read in the store's
            memory.
        expands_sparse: sparse weights are expanded for dense products; otherwise their products are
            chosen by a measurement.
        micro_batch_tokens: a micro-batch with more tokens is no faster: products are large enough.
        survives_fork: a process that has queried the device may be forked.
        gpus: GPUs that one engine takes from a scheduler's resources.
        collectives: the back end of a group's collective operations.
    """

    name: ClassVar[str]
    trace_device: ClassVar[str]
    products: ClassVar[tuple[Products, ...]] = ("torch",)
    has_own_memory: ClassVar[bool] = False
    expands_sparse: ClassVar[bool] = False
    micro_batch_tokens: ClassVar[int] = 4096
    survives_fork: ClassVar[bool] = True
    gpus: ClassVar[int] = 0
    collectives: ClassVar[Literal["gloo", "nccl"]] = "gloo"

    @abstractmethod
    def devices(self) -> tuple[str, ...]:
        """Return the names of this machine's devices."""

    def make_engine(
        self,
        program: Program,
        plan: EnginePlan,
        *,
        device: str | None = None,
        budget_bytes: int | None = None,
        slots: WeightSlots | None = None,
        sparse: SparseWeights | None = None,
    ) -> Engine:
        """Return an engine; the arguments are those of `EngineParts`."""
        return self._engine(program, plan, EngineParts(device, budget_bytes, slots, sparse))

    @abstractmethod
    def _engine(self, program: Program, plan: EnginePlan, parts: EngineParts) -> Engine:
        """Return an engine."""

    @property
    def is_available(self) -> bool:
        """Whether this machine has such a device."""
        return bool(self.devices())

    def choose_products(self, processor: Processor) -> Products:
        """Return who multiplies matrices in a run that starts here."""
        return self.products[0]

    def can_multiply_with(self, products: Products) -> bool:
        """Return whether this machine's PyTorch has the library, which the target offers."""
        return not uses_onednn(products) or has_onednn()

    def products_as_recorded(self, recorded: Products | None, processor: Processor) -> Products:
        """Return the library for products, for a run that was started with `recorded`.

        If `recorded` is empty, or names a library that this target does not offer, this machine's
        default is used.

        Raises:
            ConfigError: this machine's PyTorch lacks the recorded library.
        """
        if recorded is None or recorded not in self.products:
            return self.choose_products(processor)
        if not self.can_multiply_with(recorded):
            raise ConfigError(
                f"this run was started with float32 products by {recorded}, which this PyTorch was "
                "built without; resume it with the PyTorch that it was started with, or train in "
                "another run.dir"
            )
        return recorded

    def make_lanes(self, device: str) -> Lanes:
        """Return the queues of a device."""
        from penstock.engine.lanes import HostLanes

        return HostLanes()

    def make_masks(self, lanes: Lanes) -> DeviceMasks | None:
        """Return the memory of an engine's masks on its device; None if the target does not expand
        sparse weights."""
        from penstock.engine.expanded_weights import DeviceMasks

        return DeviceMasks(lanes) if self.expands_sparse else None

    def make_current(self, device: str) -> None:  # noqa: B027  most have one device
        """Make this the default device of the calling thread."""

    def synchronize(self) -> None:  # noqa: B027  most compute at once
        """Wait until all operations queued on this thread's device have completed."""

    def memory_bytes(self, device: str) -> tuple[int, int] | None:
        """Return the free and the total bytes of a device's own memory; None if it has none."""
        return None


class CpuTarget(Target):
    """The processor: weights are read in place."""

    name = "cpu"
    trace_device = "cpu"
    products = PRODUCTS

    def devices(self) -> tuple[str, ...]:
        return ("cpu",)

    def choose_products(self, processor: Processor) -> Products:
        return products_for(processor)

    def _engine(self, program: Program, plan: EnginePlan, parts: EngineParts) -> Engine:
        from penstock.engine.torch_engine import TorchEngine

        return TorchEngine(
            program,
            plan,
            budget_bytes=parts.budget_bytes,
            slots=parts.slots,
            sparse=parts.sparse,
        )


class WaferTarget(CpuTarget):
    """A simulated wafer-scale engine: the numbers of the processor, and the cycles of a mesh.

    A plan without a mesh, as for an evaluation, has the processor's engine.
    """

    name = "wafer"

    def devices(self) -> tuple[str, ...]:
        return ("wafer",)

    def _engine(self, program: Program, plan: EnginePlan, parts: EngineParts) -> Engine:
        if plan.wafer is None:
            return super()._engine(program, plan, parts)
        from penstock.engine.wafer_engine import WaferEngine

        return WaferEngine(
            program, plan, plan.wafer, budget_bytes=parts.budget_bytes, sparse=parts.sparse
        )


class CudaTarget(Target):
    """NVIDIA GPUs: weights are copied through page-locked memory on separate streams."""

    name = "cuda"
    trace_device = "cuda"
    has_own_memory = True
    expands_sparse = True
    micro_batch_tokens = 32768
    survives_fork = False  # the CUDA driver does not survive a fork
    gpus = 1
    collectives = "nccl"

    def devices(self) -> tuple[str, ...]:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(f"cuda:{number}" for number in range(count))

    @property
    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def _engine(self, program: Program, plan: EnginePlan, parts: EngineParts) -> Engine:
        from penstock.engine.cuda_graphs import CudaGraphs
        from penstock.engine.recorded_steps import RecordingEngine, can_be_recorded
        from penstock.engine.repeatable import choose_repeatable_kernels
        from penstock.engine.torch_engine import TorchEngine

        choose_repeatable_kernels(program)
        device, budget_bytes = parts.device or self.name, parts.budget_bytes
        if parts.slots is not None or not plan.cuda_graphs:
            slots = parts.slots or self._slots(program, plan, device)
            return TorchEngine(program, plan, device=device, budget_bytes=budget_bytes, slots=slots)
        # Evaluations get the memory of a recording whether or not they could be recorded.
        is_recorded = can_be_recorded(program, self.name)
        return RecordingEngine(
            program,
            plan,
            device=device,
            budget_bytes=budget_bytes,
            slots=self._slots(program, plan, device),
            recorder=CudaGraphs(torch.device(device)) if is_recorded else None,
        )

    def _slots(self, program: Program, plan: EnginePlan, device: str) -> DeviceSlots:
        from penstock.engine.sharing import largest_slot
        from penstock.engine.slots import DeviceSlots

        lanes = self.make_lanes(device)
        return DeviceSlots(largest_slot(program), plan.slots, lanes, self.make_masks(lanes))

    def make_lanes(self, device: str) -> Lanes:
        from penstock.engine.lanes import CudaLanes

        return CudaLanes(torch.device(device))

    def make_current(self, device: str) -> None:
        torch.cuda.set_device(device)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory_bytes(self, device: str) -> tuple[int, int] | None:
        free, total = torch.cuda.mem_get_info(device if ":" in device else None)
        return free, total


class NullTarget(Target):
    """No device: the shapes, traffic and bytes of a run, without arithmetic.

    On every machine, stages are traced as for a processor that uses PyTorch's default library.
    """

    name = "null"
    trace_device = "cpu"

    def devices(self) -> tuple[str, ...]:
        return ("null",)

    def _engine(self, program: Program, plan: EnginePlan, parts: EngineParts) -> Engine:
        from penstock.engine.null_engine import NullEngine

        return NullEngine(program, plan, budget_bytes=parts.budget_bytes)


class DescribedTarget(NullTarget):
    """A device with memory of its own that is known by its description alone: a run can be planned
    for it, and does not start on it."""

    name = "described"
    has_own_memory = True

    def devices(self) -> tuple[str, ...]:
        return ()


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (CpuTarget(), WaferTarget(), CudaTarget(), NullTarget(), DescribedTarget())
}
_PREFERRED = ("cuda", "cpu")  # for `engine.device: auto`, the first that exists


def target_of(device: str) -> Target:
    """Return the target of a device ("cuda:1"), or the target of that name.

    Raises:
        ConfigError: there is no such target.
    """
    name = device.partition(":")[0]
    if name not in TARGETS:
        raise ConfigError(f"device: expected one of {', '.join(TARGETS)}, got {device!r}")
    return TARGETS[name]


def choose_target(wanted: str) -> Target:
    """Return the target of `engine.device`; `auto` selects a GPU if there is one.

    Raises:
        ConfigError: this machine has no such device.
    """
    if wanted == "auto":
        return next(TARGETS[name] for name in _PREFERRED if TARGETS[name].is_available)
    target = target_of(wanted)
    if not target.is_available:
        raise ConfigError(
            f"engine.device: expected cpu, got {wanted}, which this machine does not have"
        )
    return target


def accelerators() -> tuple[str, ...]:
    """Return the devices of this machine that have their own memory."""
    return tuple(name for t in TARGETS.values() if t.has_own_memory for name in t.devices())
