"""A device with memory of its own, simulated on the CPU: the code of a GPU's engine, without a GPU.

Weights are copied into slots and sparse weights are expanded, by the same functions as on a GPU.
"""

from __future__ import annotations

import os

import pytest
from compiled_programs import sharing_kinds, sharing_programs

from penstock.compiler import build, sparse_lowering
from penstock.engine import (
    TARGETS,
    SharedSlots,
    Target,
    TorchEngine,
    choose_target,
    target_of,
)
from penstock.engine.sharing import largest_slot
from penstock.engine.slots import DeviceSlots
from penstock.planning import builders


class SimulatedDevice(type(target_of("cpu"))):
    """The CPU as a device that expands sparse weights."""

    name = "simulated"
    products = ("torch",)
    has_own_memory = True
    expands_sparse = True

    def devices(self):
        return (self.name,)

    def choose_products(self, processor):
        return "torch"

    def memory_bytes(self, device):
        return 8 << 30, 8 << 30

    def make_engine(
        self, program, plan, *, device=None, budget_bytes=None, slots=None, sparse=None
    ):
        if slots is None:
            lanes = self.make_lanes(self.name)
            slots = DeviceSlots(largest_slot(program), plan.slots, lanes, self.make_masks(lanes))
        assert slots.expands_sparse
        assert isinstance(slots, DeviceSlots | SharedSlots)
        return TorchEngine(program, plan, budget_bytes=budget_bytes, slots=slots)


def simulate(monkeypatch: pytest.MonkeyPatch) -> Target:
    """Let `auto` choose the simulated device, and let compilations count what it allocates."""
    target = SimulatedDevice()
    monkeypatch.setitem(TARGETS, target.name, target)
    monkeypatch.setattr(
        "penstock.training.run_assembly.choose_target",
        lambda wanted: target if wanted == "auto" else choose_target(wanted),
    )
    # What other tests have compiled, for the CPU, counts the memory of its own products.
    monkeypatch.setattr(sparse_lowering, "is_expanded", lambda weight: True)
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)  # no folder: nothing is cached on disk
    make_kind, compile_source = build.make_kind.__wrapped__, builders.compile_source.__wrapped__
    monkeypatch.setattr(build, "make_kind", sharing_kinds(make_kind))
    monkeypatch.setattr(builders, "compile_source", sharing_programs(compile_source))
    return target
