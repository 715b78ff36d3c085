"""Whose memory engines and the shards of a store take, by where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import Config
from penstock.distributed.protocol import GRADIENTS
from penstock.engine import EnginePlan, predict_bytes
from penstock.errors import BudgetError
from penstock.kernels.processor import Processor
from penstock.planning import builders, model_sources, store_factory
from penstock.planning.machine_limits import Machine
from penstock.planning.memory_budget import Budget
from penstock.planning.memory_shares import HostCapacity, MemoryShares
from penstock.planning.transfer_memory import transfer_buffer_bytes
from penstock.program import Program

MIB = 1 << 20
MODEL = {
    "preset": "gpt2",
    "overrides": {"n_layer": 8, "n_embd": 256, "n_head": 4, "vocab_size": 96, "n_positions": 32},
}


def machine(free: int = 330) -> Machine:
    """Return a machine with so many MiB free: by default most go to other parts than the store."""
    return Machine(Processor("x86_64", "GenuineIntel"), 2, 400 * MIB, free * MIB)


@pytest.fixture(scope="module")
def program() -> Program:
    source = model_sources.model_source(Config.from_mapping({"model": MODEL}).model)
    return builders.compile_source(source, micro_batch=1, length=32, precision="fp32", device="cpu")


def budget_of(config: Config, program: Program, free: int = 330) -> Budget:
    roles = store_factory.optimizer_of(config).roles
    return Budget(config, program, 2, "cpu", roles, machine(free))


def shares(program: Program, free: int = 330, **changes) -> MemoryShares:
    """Return what the parts of a run of two engines get, two micro-batches each."""
    engine = {"device": "cpu", "memory": "64MiB"}
    mapping = {"model": MODEL, "batch": {"size": 256}, "engines": 2, "engine": engine, **changes}
    config = Config.from_mapping(mapping)
    budget = budget_of(config, program, free)
    engine_bytes = budget.engine_bytes()
    return budget.divide(budget.plan(engine_bytes), engine_bytes)


OTHER_HOSTS = [
    {"start": "listen", "shards": "apart"},
    {"start": "ray", "address": "10.0.0.1:6379", "shards": "apart"},
]
THIS_HOST = [
    {"start": "listen"},
    {"start": "local", "shards": "apart"},
    {"start": "ray", "shards": "apart"},
]


@pytest.mark.long
@pytest.mark.parametrize("cluster", OTHER_HOSTS)
def test_store_on_other_hosts_may_exceed_local_memory(program, cluster):
    made = shares(program, cluster=cluster, store={"shards": 4})
    # Weights, gradients and two moments of AdamW, in float32.
    assert made.store >= 16 * program.parameters > 90 * MIB


@pytest.mark.long
@pytest.mark.parametrize("cluster", THIS_HOST)
def test_local_store_must_fit_local_memory(program, cluster):
    with pytest.raises(BudgetError, match="cannot hold this run") as caught:
        shares(program, cluster=cluster, store={"shards": 4})
    assert "other hosts" not in str(caught.value)


@pytest.mark.parametrize("cluster", OTHER_HOSTS)
def test_shards_on_flash_use_the_memory_of_their_hosts(program, cluster, tmp_path):
    store = {"shards": 4, "dram": "2GiB", "flash": {"path": str(tmp_path / "flash")}}
    assert shares(program, cluster=cluster, store=store).store == 2048 * MIB
    with pytest.raises(BudgetError, match="store, on flash besides"):
        shares(program, cluster={"start": "local", "shards": "apart"}, store=store)


def test_replicas_count_in_full(program, tmp_path):
    cluster = OTHER_HOSTS[0]
    one, two = (
        shares(program, cluster=cluster, store={"shards": 4, "replicas": replicas}).store
        for replicas in (1, 2)
    )
    assert two > 32 * program.parameters > one
    flash = {"path": str(tmp_path / "flash")}
    store = {"shards": 4, "replicas": 2, "flash": flash}
    config = Config.from_mapping({"model": MODEL, "cluster": cluster, "store": store})
    with pytest.raises(BudgetError, match=r"in 4 shards with a replica each needs [0-9,]+ bytes"):
        store_factory.flash_share(config, program, 10 * MIB)


@pytest.mark.parametrize("cluster", OTHER_HOSTS)
def test_memory_limit_applies_to_the_local_process_only(program, cluster):
    engine = {"device": "cpu"}
    made = shares(program, cluster=cluster, store={"shards": 4}, engine=engine, memory="720MiB")
    assert made.store > 90 * MIB
    assert made.engines == 0
    assert made.engine < 260 * MIB


ENGINES_ELSEWHERE = [
    {"start": "listen"},
    {"start": "ray", "address": "10.0.0.1:6379"},
    *OTHER_HOSTS,
]


@pytest.mark.parametrize("cluster", ENGINES_ELSEWHERE)
def test_remote_engines_use_no_local_memory(program, cluster):
    engine = {"device": "cpu", "memory": "8GiB"}
    made = shares(program, 900, cluster=cluster, engines=64, engine=engine)
    assert (made.engine, made.engines) == (8192 * MIB, 0)
    with pytest.raises(BudgetError, match="64 engines"):
        shares(program, 900, cluster={"start": "local"}, engines=64, engine=engine)


@pytest.mark.parametrize("cluster", ENGINES_ELSEWHERE)
@pytest.mark.parametrize("memory", [None, "2100MiB"])
def test_engine_memory_is_independent_of_the_number_of_remote_engines(program, cluster, memory):
    common = {"cluster": cluster, "engine": {"device": "cpu"}, "memory": memory}
    found = {n: shares(program, 1800, engines=n, **common).engine for n in (1, 2, 64)}
    assert len(set(found.values())) == 1, found
    # It is what one engine could have here: less than all of what is free, and not a sliver.
    assert 150 * MIB < found[64] < 1800 * MIB
    local = {"cluster": {"start": "local"}, "engine": {"device": "cpu"}, "memory": memory}
    alone, both = (shares(program, 1800, engines=n, **local).engine for n in (1, 2))
    assert both < 0.6 * alone


def test_refusal_of_remote_store_does_not_name_the_store(program):
    engine = {"device": "cpu", "memory": "64MiB"}
    with pytest.raises(BudgetError) as caught:
        shares(program, cluster=OTHER_HOSTS[0], store={"shards": 4}, engine=engine, memory="600MiB")
    lines = str(caught.value).splitlines()
    assert any(line.startswith("  calls to the store's shards, on other hosts") for line in lines)
    assert "raise memory above" in lines[-1]
    assert "store.dram" not in lines[-1]
    assert "store.flash.path" not in lines[-1]


@pytest.mark.parametrize(
    ("cluster", "shown"),
    [
        ({"start": "none"}, []),
        # 16 MiB each: to both engines, from one to the other and back, the sum from one.
        ({"start": "local"}, ["0.08 GiB"]),  # the sum is above 1 GiB
        ({"start": "local", "shared_memory": "off"}, []),
        ({"start": "listen"}, ["48.00 MiB"]),
    ],
)
def test_shared_memory_counts(program, cluster, shown):
    with pytest.raises(BudgetError) as caught:
        shares(program, cluster=cluster, memory="500MiB")
    name = "  memory that processes share (cluster.shared_memory)"
    found = [line for line in str(caught.value).splitlines() if line.startswith(name)]
    assert [" ".join(line.split()[-2:]) for line in found] == shown


def test_transfer_buffers_count_for_engine_processes(program):
    """Two buffers as large as the largest stage, one of which computes, and gradients, twice."""
    block = 4 * sum(program.weights[name].elements for name in program.stages[1].weights)
    on_the_way = transfer_buffer_bytes(program, "cpu")
    assert on_the_way == block + 2 * GRADIENTS * block  # all weights are trained, in float32
    assert transfer_buffer_bytes(program, "cuda") == on_the_way + block  # which computes on the GPU

    def plan(memory: int, start: str) -> EnginePlan:
        engine = {"device": "cpu", "memory": memory, "recompute": "never"}
        config = Config.from_mapping(
            {"model": MODEL, "engine": engine, "cluster": {"start": start}}
        )
        budget = budget_of(config, program, 999)
        return budget.plan(budget.engine_bytes())

    least = predict_bytes(program, 2, EnginePlan()).peak_bytes
    assert plan(least, "none").beside_bytes == 0
    assert plan(least + on_the_way, "local").beside_bytes == on_the_way
    with pytest.raises(BudgetError, match=r"of it for transfer buffers\), the budget is"):
        plan(least + on_the_way - 1, "local")


@pytest.mark.parametrize("cluster", [{"start": "local"}, {"start": "ray"}])
def test_local_workers_count_with_standby_engines_and_shards(program, cluster):
    """A forked one with what it has for itself, another with all libraries."""
    found = {}
    for spare, where in ((0, "here"), (3, "here"), (3, "apart")):
        each = {**cluster, "spare": spare, "shards": where}
        with pytest.raises(BudgetError) as caught:
            shares(program, cluster=each, memory="600MiB", store={"shards": 4})
        (line,) = [x for x in str(caught.value).splitlines() if "worker processes" in x]
        found[spare, where] = float(line.split()[-2]) * (1024 if "GiB" in line else 1)
    one = found[0, "here"] / 2
    if cluster["start"] == "local":
        one = 76 + len(program.stages)
        assert found[0, "here"] == pytest.approx(320 + 2 * one, abs=22)
    else:
        assert one == pytest.approx(400, abs=10)
    assert found[3, "here"] - found[0, "here"] == pytest.approx(3 * one, abs=22)
    assert found[3, "apart"] - found[3, "here"] == pytest.approx(4 * one, abs=22)


def test_too_many_local_engines_are_refused_with_the_sum(program):

    def room(start: str) -> HostCapacity | None:
        engine = {"device": "cpu", "memory": "64MiB"}
        run = {"model": MODEL, "batch": {"size": 64}, "engines": 2, "engine": engine}
        config = Config.from_mapping({**run, "cluster": {"start": start}})
        budget = budget_of(config, program, 1500)
        return budget.room(budget.divide(budget.plan(64 * MIB), 64 * MIB))

    found = room("local")
    assert found is not None
    most = (found.limit - found.others) // found.engine
    assert most >= 2
    found.require(most)
    with pytest.raises(
        BudgetError,
        match=rf"^engines: {most + 1} on this machine need {most + 1} x [0-9.]+ [GM]iB beside the "
        rf"[0-9.]+ [GM]iB of the other parts, .* the limit is .*: there is room for {most}$",
    ):
        found.require(most + 1)
    assert room("listen") is None


def test_engines_may_keep_as_much_as_they_use_where_memory_suffices(program):
    one, two = (shares(program, free=2000, engines=count) for count in (1, 2))
    assert one.engine_most == 2 * one.engine_host
    assert two.engine_most == 2 * two.engine_host
    assert one.limit <= machine(2000).memory_bytes - 48 * MIB  # buffers of a checkpoint's writer


def test_pages_that_engines_keep_fit_beside_all_other_parts(program, tmp_path):
    flash = {"flash": {"path": str(tmp_path / "flash")}}
    for count in (1, 2):
        budget = {"engines": count, "memory": "700MiB", "store": flash}
        made = shares(program, free=2000, **budget)
        known = (400 + 16 + 48 + 128) * MIB  # libraries, batches, checkpoints, reserve
        assert made.engine_host < made.engine_most < 2 * made.engine_host
        assert known + made.store + count * made.engine_most <= 700 * MIB


@pytest.mark.parametrize("cluster", OTHER_HOSTS)
def test_engines_of_other_hosts_keep_at_most_as_much_as_they_use(program, cluster):
    store = {"shards": 4}
    roomy = shares(program, free=2000, cluster=cluster, store=store)
    assert roomy.engine_most == 2 * roomy.engine_host
    tight = shares(program, free=2000, cluster=cluster, store=store, memory="690MiB")
    assert tight.engine_host <= tight.engine_most < 2 * tight.engine_host


def test_store_on_flash_leaves_a_quarter_of_the_engines_memory_for_kept_pages(program, tmp_path):
    flash = {"flash": {"path": str(tmp_path / "flash")}}
    made = shares(program, free=2000, engines=1, memory="1GiB", store=flash)
    assert made.engine_most == pytest.approx(1.25 * made.engine_host, rel=0.01)
    tight = shares(program, free=2000, engines=1, memory="649MiB", store=flash)
    assert tight.engine_host <= tight.engine_most < 1.2 * tight.engine_host


def test_engine_for_evaluation_gets_what_the_store_leaves_where_engine_memory_is_larger(
    program, tmp_path
):
    flash = {"flash": {"path": str(tmp_path / "flash")}}
    large = {"device": "cpu", "memory": "256MiB"}
    made = shares(program, free=2000, engines=1, engine=large, memory="800MiB", store=flash)
    known = (400 + 16 + 48 + 128) * MIB  # libraries, batches, checkpoints, reserve
    assert made.engine == 256 * MIB
    assert made.engine_host <= made.inference < 100 * MIB
    assert known + made.store + made.inference <= 800 * MIB
    roomy = shares(
        program, free=2000, engines=1, engine=large, memory="2GiB", store={"dram": "auto"}
    )
    assert roomy.inference == roomy.engine == 256 * MIB


def loading_bytes(program: Program, folder: Path, moments: str) -> float:
    """Return the memory per element for gathering a weight and its state."""
    config = Config.from_mapping(
        {
            "model": MODEL,
            "optimizer": {"moments": moments},
            "store": {"flash": {"path": str(folder)}},
            "engine": {"device": "cpu"},
        }
    )
    weight = program.weights["transformer.h.0.mlp.c_fc.weight"]
    return budget_of(config, program, 2000)._loading_bytes(weight) / weight.elements


def test_loading_onto_flash_counts_moments_by_their_types(program, tmp_path):
    assert loading_bytes(program, tmp_path, "fp32") == 4 + 4 + 8
    assert loading_bytes(program, tmp_path, "8bit") == pytest.approx(4 + 4 + 2, rel=0.01)


@pytest.mark.parametrize("where", ["memory", "flash"])
def test_memory_of_a_mask_change_is_told_apart(program, tmp_path, where):
    names = [f"transformer.h.{layer}.mlp.c_fc.weight" for layer in range(8)]
    half = {name: program.weights[name].elements // 2 for name in names}
    store = {"flash": {"path": str(tmp_path / "flash")}} if where == "flash" else {}
    passing = {}
    for method in ("static", "rigl"):
        config = Config.from_mapping(
            {
                "model": MODEL,
                "sparsity": {"method": method, "sparsity": 0.5},
                "engine": {"device": "cpu"},
                "memory": "1GiB",
                "checkpoint": {"buffer": "16MiB"},
                "store": store,
            }
        )
        source = model_sources.model_source(config.model)
        made = builders.compile_source(
            source, micro_batch=1, length=32, precision="fp32", device="cpu", sparse=half
        )
        budget = budget_of(config, made, 2000)
        engine_bytes = budget.engine_bytes()
        passing[method] = budget.divide(budget.plan(engine_bytes), engine_bytes).mask_change
    assert passing["static"] == 0
    assert passing["rigl"] >= 24 * 256 * 1024 // 2  # of the largest weight
