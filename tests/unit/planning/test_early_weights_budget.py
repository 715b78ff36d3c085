"""Memory for weights that are streamed early: counted where it is used, and never needed."""

from __future__ import annotations

import contextlib

import pytest
from test_memory_budget import MIB, MODEL, machine

from penstock.config import Config
from penstock.engine import EnginePlan
from penstock.errors import BudgetError
from penstock.planning import builders, model_sources, store_factory
from penstock.planning.memory_budget import Budget, MemoryShares
from penstock.program import Program

ENGINE = {"device": "cpu", "memory": "64MiB"}
FREE = 3000


@pytest.fixture(scope="module")
def program() -> Program:
    source = model_sources.model_source(Config.from_mapping({"model": MODEL}).model)
    return builders.compile_source(source, micro_batch=1, length=32, precision="bf16", device="cpu")


def config_of(**changes) -> Config:
    mapping = {"model": MODEL, "precision": "bf16", "batch": {"size": 2}, "engine": ENGINE}
    return Config.from_mapping({**mapping, **changes})


def shares(program: Program, device: str = "cuda", free: int = FREE, **changes) -> MemoryShares:
    config = config_of(**changes)
    roles = store_factory.optimizer_of(config).roles
    budget = Budget(config, program, 2, device, roles, machine(free))
    return budget.divide(EnginePlan(), 64 * MIB)


def test_a_store_beside_a_gpu_has_memory_for_early_weights(program):
    with_early, without = shares(program), shares(program, store={"early_weights": False})
    assert with_early.early >= 2 * program.parameters
    assert without.early == 0
    assert with_early.store == without.store + with_early.early


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cpu"},
        {"store": {"shards": 2}},
        {"optimizer": {"moments": "8bit"}},
        {"optimizer": {"name": "sgd", "momentum": 0.0}},
        {"cluster": {"start": "local"}},
    ],
)
def test_other_stores_have_none(program, changes):
    assert shares(program, **changes).early == 0


def test_a_run_that_fits_only_without_early_weights_has_none(program):
    """Whatever limits it: the memory of the host, or `store.dram`."""
    found = []
    for free in range(300, 420, 2):
        with contextlib.suppress(BudgetError):  # too little for the run itself
            found.append(shares(program, free=free).early)
    assert found[0] == 0 < found[-1]
    assert sorted(found) == found  # with more memory never less
    most = sum(make(config_of(), program).memory_bytes.values())
    assert shares(program, store={"dram": most}).early == 0


def make(config: Config, program: Program, *, streams_early: bool = False):
    return store_factory.make_store(config, program, "cpu", streams_early=streams_early)


def test_no_limit_is_too_small_with_early_weights_that_suffices_without(program):
    plain = sum(make(config_of(), program).memory_bytes.values())
    early = store_factory.early_bytes(config_of(), program, "cuda")
    for limit in (plain, plain + early - 1, plain + early, plain + early + 1):
        config = config_of(store={"dram": limit})
        store = make(config, program, streams_early=True)
        store.defer(1)
        assert sum(store.memory_bytes.values()) <= limit
        assert (store.early_elements > 0) == (limit >= plain + early)
    assert make(config_of(), program).early_elements == 0
