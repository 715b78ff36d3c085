"""How a batch is divided is the same for any number of engines, also where one cannot do it."""

from __future__ import annotations

import functools

import pytest
from tiny_models import LENGTH, language_model

from penstock.config import Config
from penstock.engine import can_fit, least_kept_bytes, predict_bytes
from penstock.engine.interface import EnginePlan
from penstock.engine.recompute_planner import bytes_of_choice
from penstock.errors import BudgetError
from penstock.planning import builders, model_sources
from penstock.planning.execution_plan import plan_execution
from penstock.planning.micro_batching import MicroBatchPlan, divide_batch

SIZE = 4
SOURCE = language_model("gpt2").source(0)
compile_source = builders.compile_source


@functools.cache
def compile_for(micro_batch: int, slot_bytes: int | None):
    """Compile once what all tests here ask for; an error is raised each time."""
    return compile_source(
        SOURCE, micro_batch=micro_batch, length=LENGTH, precision="fp32", slot_bytes=slot_bytes
    )


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    def compile_again(source, *, micro_batch, slot_bytes, **same):
        return compile_for(micro_batch, slot_bytes)

    monkeypatch.setattr(builders, "compile_source", compile_again)


@pytest.fixture(scope="module")
def single():
    return compile_for(1, None)


def config(memory: int, engines: int = 1, **batch) -> Config:
    return Config.from_mapping(
        {
            "model": "gpt2",
            "batch": {"size": SIZE, **batch},
            "engine": {"memory": memory, "device": "cpu"},
            "engines": engines,
        }
    )


@pytest.fixture(scope="module")
def too_little_for_one(single) -> int:
    """What does for half the batch, and not for the whole of it, with the smallest stages."""
    largest = max(weight.stream_bytes for weight in single.weights.values())
    finest = compile_for(1, largest + largest // 16)
    assert len(finest.stages) > len(single.stages)
    half, whole = (bytes_of_choice(finest, count)[0] for count in (SIZE // 2, SIZE))
    assert half < whole
    return (half + whole) // 2


def test_memory_grows_with_the_number_of_micro_batches(single):
    plan = EnginePlan(
        recompute=frozenset(s.index for s in single.stages[:-1] if s.kind.saved_bytes)
    )
    needs = [predict_bytes(single, count, plan).peak_bytes for count in range(1, 10)]
    assert needs == sorted(needs)
    for count, need in enumerate(needs, 1):
        assert can_fit(single, count, need)
        assert not can_fit(single, count, need - 1)


def test_micro_batch_is_minimal_if_one_engine_cannot_hold_the_batch(too_little_for_one):
    made = [
        divide_batch(config(too_little_for_one, engines), compile_for, "cpu", LENGTH)
        for engines in (1, 2, 4)
    ]
    assert {(each.micro_batch, each.slot_bytes, each.is_for_many) for each in made} == {
        (1, made[0].slot_bytes, True)
    }


def test_one_engine_is_refused_two_are_accepted_and_remedy_is_named(
    too_little_for_one,
):
    with pytest.raises(BudgetError, match=r"the engine needs .* for a step of 4 micro-batch"):
        plan_execution(config(too_little_for_one), SOURCE, "cpu", LENGTH)
    told: list[str] = []
    made = plan_execution(config(too_little_for_one, 2), SOURCE, "cpu", LENGTH, notice=told.append)
    assert (made.micro_batch, made.micro_batches) == (1, SIZE)
    assert told == [
        "batch.micro: auto is 1, the minimum, since one engine cannot hold a step of 4 sequences. "
        "The result is then the same with any number of engines; to choose for 2 engines alone, "
        "set batch.micro to a divisor of 4"
    ]


def test_resumed_run_keeps_its_stage_cut(single):
    four = config(bytes_of_choice(single, 1)[0], 4)
    made = plan_execution(four, SOURCE, "cpu", LENGTH, 1, None)
    assert (made.micro_batch, made.slot_bytes) == (1, None)
    made = plan_execution(four, SOURCE, "cpu", LENGTH)
    assert made.slot_bytes is not None


def test_configured_micro_batch_is_used(too_little_for_one):
    made = divide_batch(config(too_little_for_one, micro=2), compile_for, "cpu", LENGTH)
    assert isinstance(made, MicroBatchPlan)
    assert made.micro_batch == 2


class Compiler:
    """Compiles, and counts."""

    def __init__(self) -> None:
        self.micro_batches: list[int] = []

    def __call__(self, micro_batch: int, slot_bytes: int | None):
        self.micro_batches.append(micro_batch)
        return compile_for(micro_batch, slot_bytes)


def batch_of_32(memory: int) -> Config:
    settings = config(memory).to_mapping() | {"batch": {"size": 32}}
    return Config.from_mapping(settings)


def needs(micro_batch: int) -> int:
    """Return the least bytes of an engine for 32 sequences."""
    return bytes_of_choice(compile_for(micro_batch, None), 32 // micro_batch)[0]


@pytest.mark.long
@pytest.mark.parametrize("least", [1, 2, 4, 8, 16, 32])
def test_largest_micro_batch_that_fits_is_chosen(least):
    """Not always the next larger one needs more: partial sums of gradients need memory as well."""
    memory = needs(least)
    fitting = max(count for count in (1, 2, 4, 8, 16, 32) if needs(count) <= memory)
    compiler = Compiler()
    made = divide_batch(
        batch_of_32(memory), compiler, "cpu", LENGTH, micro_batch_tokens=32 * LENGTH
    )
    assert (made.micro_batch, made.is_for_many) == (fitting, False)
    assert len(set(compiler.micro_batches)) <= (
        4 if fitting > 2 else 6
    )  # beyond are those passed over


def test_refused_budget_names_one_that_is_enough():
    """Larger budgets have larger stages, which need more; but the smallest are tried as well."""
    wide = {"preset": "gpt2", "n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 64}
    model = {**wide, "n_positions": LENGTH}
    source = model_sources.model_source(Config.from_mapping({"model": model}).model)

    def compile_wide(micro_batch: int, slot_bytes: int | None):
        return compile_source(
            source, micro_batch=micro_batch, length=LENGTH, precision="fp32", slot_bytes=slot_bytes
        )

    def needed(memory: int) -> int | None:
        """Return what a refusal says is needed; None if the budget is enough."""
        engine = {"device": "cpu", "memory": memory}
        made = Config.from_mapping({"model": model, "batch": {"size": 2}, "engine": engine})
        division = divide_batch(made, compile_wide, "cpu", LENGTH)
        if not division.is_for_many:
            return None
        return bytes_of_choice(division.program, 2)[0]

    whole = bytes_of_choice(compile_wide(1, None), 2)[0]
    least = needed(whole // 4)
    assert least is not None
    assert least < whole // 2
    for memory in range(least, whole, whole // 20):
        assert needed(memory) is None, memory


@pytest.mark.long
def test_nothing_is_compiled_between_if_the_batch_alone_is_too_much_for_one_engine():
    kept = least_kept_bytes(compile_for(32, None), 1)
    compiler = Compiler()
    memory = batch_of_32(kept - 1)
    made = divide_batch(memory, compiler, "cpu", LENGTH, micro_batch_tokens=32 * LENGTH)
    assert (made.micro_batch, made.is_for_many) == (1, True)
    assert set(compiler.micro_batches) == {32, 1}


def test_least_kept_bytes_depend_on_the_samples_and_are_less_than_a_step_needs():
    kept = {count: least_kept_bytes(compile_for(count, None), 32 // count) for count in (1, 4, 32)}
    assert set(kept.values()) == {kept[1]}
    assert 0 < kept[1] < needs(1)
