"""A run that does not fit is refused with advice, and who follows it has a run that fits."""

from __future__ import annotations

import re

import pytest

from penstock.config import Config
from penstock.engine import EnginePlan
from penstock.errors import BudgetError
from penstock.kernels.processor import Processor
from penstock.planning import builders, model_sources, store_factory
from penstock.planning.machine_limits import Machine
from penstock.planning.memory_budget import Budget
from penstock.program import Program

MIB = 1 << 20
MODEL = {
    "preset": "gpt2",
    "overrides": {"n_layer": 8, "n_embd": 256, "n_head": 4, "vocab_size": 96, "n_positions": 32},
}
LIBRARIES = 400 * MIB
KEYS = {
    "raise memory above": "memory",
    "lower store.dram to": "store.dram",
    "lower engine.memory to": "engine.memory",
    "lower checkpoint.buffer to": "checkpoint.buffer",
}
FLASH, BATCH = "set store.flash.path to a folder on a fast disk", "lower batch.size"


@pytest.fixture(scope="module")
def program() -> Program:
    source = model_sources.model_source(Config.from_mapping({"model": MODEL}).model)
    return builders.compile_source(source, micro_batch=1, length=32, precision="fp32", device="cpu")


def fit(program: Program, changes: list[str], free: int) -> None:
    """Divide the memory of a run on a machine with so many MiB beside the libraries."""
    config = Config.from_mapping({"model": MODEL, "engine": {"device": "cpu"}}, changes)
    roles = store_factory.optimizer_of(config).roles
    machine = Machine(Processor("x86_64", "GenuineIntel"), 2, LIBRARIES, free * MIB)
    budget = Budget(config, program, 2, "cpu", roles, machine)
    engine_bytes = budget.engine_bytes()
    plan: EnginePlan = budget.plan(engine_bytes)
    budget.divide(plan, engine_bytes)


def advice(program: Program, changes: list[str], free: int) -> list[str]:
    """Return the ways that the refusal of a run names."""
    with pytest.raises(BudgetError, match="cannot hold this run") as caught:
        fit(program, changes, free)
    last = str(caught.value).splitlines()[-1]
    return last.split(" above the limit: ")[1].rstrip(".").split(", or ")


@pytest.mark.parametrize(
    ("changes", "free", "expected"),
    [
        (["memory=300MiB"], 2000, {"memory"}),  # less than the libraries
        (["memory=650MiB"], 2000, {"memory", FLASH}),
        (["memory=730MiB"], 2000, {"memory", FLASH, "checkpoint.buffer"}),
        (["checkpoint.buffer=8MiB", "memory=650MiB"], 2000, {"memory", FLASH}),
        (
            ["checkpoint.buffer=8MiB", "memory=640MiB"],
            2000,
            {"memory", f"{FLASH} and {BATCH}"},
        ),
        ([], 100, set()),
        ([], 250, {FLASH}),
        (["memory=2GiB"], 250, {FLASH}),  # more than the machine has
        (
            ["store.flash.path=f", "store.dram=300MiB", "memory=700MiB"],
            2000,
            {"memory", "store.dram"},
        ),
        (["store.flash.path=f", "store.dram=300MiB", "memory=600MiB"], 2000, {"memory"}),
        (["store.flash.path=f", "memory=500MiB"], 2000, {"memory"}),
    ],
)
def test_run_that_follows_any_advice_fits(program, tmp_path, changes, free, expected):
    changes = [change.replace("path=f", f"path={tmp_path}/f") for change in changes]
    found = set()
    for way in advice(program, changes, free):
        if way == "use a machine with more memory":
            fit(program, changes, 4000)
            assert not expected
            continue
        if way.startswith(BATCH):
            found.add(BATCH)
            continue
        if way.startswith(f"{FLASH} and {BATCH}"):
            found.add(f"{FLASH} and {BATCH}")
            continue
        if way == FLASH:
            found.add(FLASH)
            fit(program, [*changes, f"store.flash.path={tmp_path}/f"], free)
            continue
        words, size = re.fullmatch(r"(.*) (\S+ ?[GMK]iB)", way).groups()
        found.add(KEYS[words])
        fit(program, [*changes, f"{KEYS[words]}={size.replace(' ', '')}"], free)
    assert found == expected


@pytest.mark.parametrize(("memory", "is_named"), [("900MiB", True), ("300MiB", False)])
def test_smaller_batch_is_named_only_if_one_could_fit(program, memory, is_named):
    ways = advice(program, ["batch.size=200000", f"memory={memory}"], 2000)
    assert any(way.startswith(BATCH) for way in ways) == is_named


def test_store_that_does_not_fit_its_host_may_be_divided_between_hosts(program):
    changes = ["cluster.start=listen", "engines=2"]
    ways = advice(program, changes, 300)
    (way,) = [way for way in ways if way.startswith("divide the store between")]
    hosts = int(re.fullmatch(r".* with store\.shards: (\d+) and cluster\.shards: apart", way)[1])
    assert hosts >= 2
    fit(program, [*changes, f"store.shards={hosts}", "cluster.shards=apart"], 300)


def test_store_of_a_run_on_one_host_is_not_divided(program):
    for start in ("none", "local"):
        assert not any(
            "store.shards" in w for w in advice(program, [f"cluster.start={start}"], 250)
        )
