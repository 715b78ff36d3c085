"""How the products of a run's sparse weights are computed: measured, or taken from the record.

A device that expands sparse weights has one way, and nothing is measured. On others, every case
that the masks of the run can reach is measured before the first step, because the ways differ in
the last bits, or taken from an earlier run on this host. Evaluation and generation add the cases of
their own programs.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.engine import (
    Engine,
    EnginePlan,
    ProductCase,
    SparseProducts,
    SparseWeights,
    target_of,
)
from penstock.planning.execution_plan import ExecutionPlan
from penstock.planning.kept_choices import keep_choices, kept_choices
from penstock.program import Program
from penstock.store import Store, kept_entries
from penstock.telemetry import CoreUse

_NOTICE_SECONDS = 5.0  # at least, between two notices on the progress of a measurement


def with_products(
    plan: ExecutionPlan,
    run_steps: int,
    recorded: Sequence[Mapping[str, Any]] | None,
    notice: Callable[[str], None],
) -> ExecutionPlan:
    """Return a plan whose engines can compute with its sparse weights; any other plan as it is.

    Args:
        run_steps: number of steps of the run.
        recorded: the choices of a resumed run.
        notice: called with a sentence for the user, if something must be measured.

    Raises:
        ConfigError: the record is not one of choices.
    """
    if plan.sparse is None:
        return plan
    products = SparseProducts() if recorded is None else SparseProducts.from_record(recorded)
    if target_of(plan.device).expands_sparse:
        return replace(plan, sparse_weights=SparseWeights(products))
    cases = products.cases(plan.program, plan.sparse.reachable_sparsities(run_steps))
    _measure(products, cases, progress_notices(notice))
    return replace(plan, sparse_weights=SparseWeights(products))


def _measure(
    products: SparseProducts,
    cases: Sequence[ProductCase],
    on_case: Callable[[int, int], None] = lambda number, count: None,
) -> None:
    """Give every case a choice: that of the run, of an earlier run, or of a measurement."""
    products.add(kept_choices(cases))
    before = CoreUse.now()
    keep_choices(products.measure(cases, on_case), before)


def progress_notices(
    notice: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """Return what gives a notice before the first case of a measurement, and before a later one
    where the last notice was long enough ago.

    **Arguments:** `clock` returns seconds.
    """
    told_at = -math.inf

    def on_case(number: int, count: int) -> None:
        nonlocal told_at
        if number > 1 and clock() < told_at + _NOTICE_SECONDS:
            return
        told_at = clock()
        text = f"measuring the products of sparse weights, case {number} of {count}"
        about = " (a case is a shape, type, number of tokens and sparsity, and takes some seconds)"
        notice(text + about * (number == 1))

    return on_case


def measure_current(plan: ExecutionPlan, program: Program, store: Store) -> None:
    """Measure what another program of the model needs for its products with the present masks."""
    if plan.sparse is None or plan.sparse_weights is None:
        return
    if target_of(plan.device).expands_sparse:
        return
    elements, products = plan.sparse.elements, plan.sparse_weights.products
    kept = kept_entries(store)
    sparsities = {name: (1 - count / elements[name],) for name, count in kept.items()}
    _measure(products, products.cases(program, sparsities))


def make_inference_engine(plan: ExecutionPlan, program: Program) -> Engine:
    """Return an engine for the forward sweep of another program of the model."""
    return target_of(plan.device).make_engine(
        program, EnginePlan(), budget_bytes=plan.inference_bytes, sparse=plan.sparse_weights
    )
