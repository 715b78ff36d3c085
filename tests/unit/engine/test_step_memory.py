"""The memory of a step, from the record of a few micro-batches, against a dry run with all."""

import random

import pytest
from grids import quick_first
from sparse_steps import pruned_case
from tiny_models import LENGTH, language_model

from penstock.engine import EnginePlan
from penstock.engine.null_engine import dry_run
from penstock.engine.step_memory import StepMemory
from penstock.planning import builders

COUNTS = (1, 2, 3, 5, 8, 13, 24)


def dense(family, precision="fp32", **options):
    source = language_model(family).source(0)
    return builders.compile_source(
        source, micro_batch=2, length=LENGTH, precision=precision, **options
    )


def sparse(precision):
    def in_blocks(name, parameter):
        return parameter.dim() == 2 and any(part.isdigit() for part in name.split("."))

    return pruned_case(language_model("gpt2"), in_blocks, precision=precision).program


PROGRAMS = {
    "gpt2 fp32": lambda: dense("gpt2"),
    "gpt2 bf16": lambda: dense("gpt2", "bf16"),
    "bert bf16": lambda: dense("bert", "bf16"),
    "frozen": lambda: dense("gpt2", "bf16", freeze=("*.0.*",)),
    "sparse": lambda: sparse("bf16"),
}


@pytest.mark.parametrize("name", quick_first(PROGRAMS, ["sparse"]))
def test_a_few_micro_batches_tell_the_memory_of_any_number(name):
    program, draw = PROGRAMS[name](), random.Random(name)
    stages = range(len(program.stages) - 1)
    chosen = (frozenset(), frozenset(stages), *(frozenset(draw.sample(stages, 2)) for _ in "ab"))
    has_sparse = any(weight.is_sparse for weight in program.weights.values())
    for recompute in chosen:
        for dense_gradients in (False, True) if has_sparse else (False,):
            plan = EnginePlan(recompute, dense_gradients=dense_gradients)
            for expands in (False, True) if has_sparse else (False,):
                memory = StepMemory(program, plan, expands)
                for count in COUNTS:
                    run = dry_run(program, count, plan, expands)
                    expected = run.peak_bytes, run.peak_at
                    assert memory.peak(count) == expected, (count, sorted(recompute))
