"""Whether a load fits an engine, by the account that a run is refused by."""

from __future__ import annotations

from penstock.engine import EnginePlan, plan_engine, predict_bytes
from penstock.planning import transfer_buffer_bytes
from penstock.program import Program
from simulated_cluster.machines import Load, Machine


def fit(machine: Machine, program: Program, load: Load) -> tuple[EnginePlan, int]:
    """Return the plan of an engine that keeps no more than it must, and the bytes that it takes.

    With relays it adds no gradients of other engines. (The account of a run keeps room for them: it
    goes on when its relays are lost.)

    **Raises:** `BudgetError` with what the load needs, where the machine has less.
    """
    device, beside = "cuda", 0
    if machine.takes_messages:
        device, beside = "cpu", transfer_buffer_bytes(program, "cpu", adds=not load.relays)
    plan = plan_engine(
        program,
        load.sequences,
        machine.memory_bytes,
        recompute="always",
        device=device,
        beside_bytes=beside,
    )
    return plan, predict_bytes(program, load.sequences, plan, device).peak_bytes
