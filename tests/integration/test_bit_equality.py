"""What must not change a single bit: stopping and resuming, recomputation, the number of engines.

Two runs are equal when their losses are equal as numbers and the hashes of their weights agree.
"""

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import warm_start
from grids import quick_first, thinned
from plain_training import Recipe, trainer_of
from sweeps import gradients_by_weight, sweep
from tiny_models import FIELDS, LENGTH, language_model
from torch import nn

from penstock.data import ArraySource
from penstock.engine import EnginePlan, TorchEngine
from penstock.engine.recompute_planner import bytes_of_choice
from penstock.models import InputSpec, ModelSource
from penstock.planning import builders
from penstock.training.trainer import Trainer

PLAN = EnginePlan()
STEPS = 8
PRECISIONS = ("fp32", "bf16")
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.15}


def gpt2(dropout):
    return language_model("gpt2", **(DROPOUT if dropout else {}))


def recipe_of(seed=0, **changes):
    return Recipe(seed=seed, steps=STEPS, warmup_steps=2, **changes)


def run(folder, case, recipe=None, until=None, **changes):
    """Train and return (losses, hash of the weights); with `until`, stop after that step."""
    trainer, events = trainer_of(case, recipe or recipe_of(), folder, until, **changes)
    trainer.train()
    return [event.loss for event in events], trainer.store.content_hash()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return what a run on one engine, without a stop, gives."""

    @functools.cache
    def uninterrupted_run(precision, dropout):
        return run(tmp_path_factory.mktemp("whole"), gpt2(dropout), precision=precision)

    return uninterrupted_run


@pytest.mark.parametrize(("precision", "dropout"), thinned(PRECISIONS, [False, True]))
def test_resumed_run_equals_uninterrupted_run(precision, dropout, uninterrupted, tmp_path):
    case = gpt2(dropout)
    losses, weights = uninterrupted(precision, dropout)
    assert len(losses) == STEPS
    went_on = []
    for until in (1, 4, None):  # twice stopped, three trainers on one folder
        part, last = run(tmp_path / "parts", case, until=until, precision=precision)
        assert len(went_on) + len(part) == (until or STEPS)
        went_on += part
    assert went_on == losses
    assert last == weights


@pytest.mark.long
def test_resume_in_another_process_gives_the_same_bits(uninterrupted, tmp_path):
    case = gpt2(dropout=True)
    losses, weights = uninterrupted("fp32", True)
    begun, _ = run(tmp_path / "parts", case, until=3)
    script = (
        "import sys\n"
        "from test_bit_equality import gpt2, run\n"
        "from pathlib import Path\n"
        "losses, weights = run(Path(sys.argv[1]), gpt2(True))\n"
        "print(repr(losses)); print(weights)\n"
    )
    here = Path(__file__).parent
    done = warm_start.run(
        [sys.executable, "-c", script, tmp_path / "parts"],
        env={"PYTHONPATH": f"{here}:{here.parent}", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    went_on, last = done.stdout.strip().splitlines()
    assert [*begun, *eval(went_on)] == losses
    assert last == weights


@pytest.mark.parametrize(("precision", "dropout"), thinned(PRECISIONS, [False, True]))
def test_recomputing_equals_keeping(precision, dropout, uninterrupted, tmp_path):
    case = gpt2(dropout)
    for kind in ("never", "always"):
        found = run(tmp_path / kind, case, precision=precision, engine={"recompute": kind})
        assert found == uninterrupted(precision, dropout), kind  # which is "auto"


@pytest.mark.parametrize("family", quick_first(sorted(FIELDS), ["gpt2", "llama"]))
def test_recomputing_equals_keeping_in_every_family(family, tmp_path):
    case = language_model(family)
    recipe = Recipe(seed=1, steps=2, warmup_steps=0)
    kept = run(tmp_path / "kept", case, recipe, engine={"recompute": "never"})
    assert run(tmp_path / "made", case, recipe, engine={"recompute": "always"}) == kept


@pytest.mark.parametrize(
    ("precision", "dropout", "numbers"), thinned(PRECISIONS, [False, True], [(2, 5), (3, 4)])
)
def test_any_number_of_engines_gives_the_same_bits(precision, dropout, numbers, tmp_path):
    case, recipe = gpt2(dropout), recipe_of(size=10, micro=2)  # 5 micro-batches: no power of two
    alone = run(tmp_path / "1", case, recipe, precision=precision)
    for engines in numbers:
        folder = tmp_path / str(engines)
        assert run(folder, case, recipe, precision=precision, engines=engines) == alone, engines


@pytest.mark.parametrize(("features", "micro"), [(17, 2), (19, 3)])
def test_any_number_of_engines_gives_the_same_bits_with_rows_of_any_size(features, micro, tmp_path):
    """Float rows may begin anywhere in a cache line, and matrix products round accordingly."""
    x = np.random.default_rng(features).standard_normal((512, features)).astype(np.float32)
    source = ArraySource({"input": x, "target": np.sin(x).sum(1, keepdims=True)})

    def train(engines):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(features, 33), nn.Tanh(), nn.Linear(33, 1))
        trainer = Trainer(
            {
                "batch": {"size": 12, "micro": micro},
                "engines": engines,
                "engine": {"threads": 1},
                "run": {"dir": str(tmp_path / str(engines)), "steps": STEPS},
            },
            model=ModelSource.from_module(
                module,
                loss=nn.functional.mse_loss,
                inputs={"input": InputSpec((features,))},
                targets={"target": InputSpec((1,))},
            ),
            source=source,
            quiet=True,
        )
        return trainer.train()["loss"], trainer.store.content_hash()

    alone = train(1)
    for engines in (2, 4):
        assert train(engines) == alone, engines


def test_resume_with_other_engines_and_recomputation_gives_the_same_bits(uninterrupted, tmp_path):
    case = gpt2(dropout=True)
    losses, weights = uninterrupted("fp32", True)
    begun, _ = run(tmp_path / "parts", case, until=3, engines=2)
    changed = {"engines": 4, "engine": {"recompute": "always"}}
    ended, last = run(tmp_path / "parts", case, **changed)
    assert (begun + ended, last) == (losses, weights)


@pytest.mark.parametrize("seed", range(3))
def test_micro_batch_order_changes_no_bit(seed, tmp_path):
    """A micro-batch keeps its number, and the sum is a tree over these numbers."""
    case = gpt2(dropout=True)
    trainer, _ = trainer_of(case, recipe_of(seed, size=14), tmp_path)
    program = trainer.program
    weights = {name: trainer.store.master(name) for name in program.weights}
    rows = trainer._data.training.batch(0, range(14), 14)
    parts = [
        {name: torch.from_numpy(value[2 * i : 2 * i + 2]) for name, value in rows.items()}
        for i in range(7)
    ]

    def sums(order):
        """Feed each micro-batch as an engine of its own would see it, in this order."""
        found, losses = {stage.index: [] for stage in program.stages}, {}
        for number in order:
            part = sweep(
                TorchEngine(program, PLAN),
                PLAN,
                weights,
                [parts[number]],
                first=number,
                total=7,
                seed=seed,
                scale=0.01,
            )
            (losses[number],) = part.losses
            for index, nodes in part.nodes.items():
                found[index] += nodes
        return gradients_by_weight(program, found, 7), [losses[n] for n in range(7)]

    expected, losses = sums(range(7))
    for order in ([6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 2, 5, 1, 4]):
        found, again = sums(order)
        assert again == losses
        assert found.keys() == set(program.weights)
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_comparison_detects_different_runs(uninterrupted, tmp_path):
    """The tests above compare hashes: a hash must differ where training does."""
    _, weights = uninterrupted("fp32", True)
    _, other = run(tmp_path, gpt2(dropout=True), recipe_of(seed=1))
    assert other != weights
    _, without = uninterrupted("fp32", False)
    assert without != weights


@pytest.mark.long
def test_micro_batch_is_independent_of_engines_when_memory_is_short(tmp_path, monkeypatch):
    compile_source, programs = builders.compile_source, {}

    def compile_once(source, **asked):  # the same for every number of engines
        key = repr(sorted(asked.items()))
        if key not in programs:
            programs[key] = compile_source(source, **asked)
        return programs[key]

    monkeypatch.setattr(builders, "compile_source", compile_once)
    case, recipe = gpt2(dropout=True), Recipe(seed=0, steps=2, warmup_steps=1, size=8)
    small = compile_once(
        case.source(0), micro_batch=2, length=LENGTH, precision="fp32", device="cpu"
    )
    memory = bytes_of_choice(small, 4)[0]  # for one engine with micro-batches of 2, and no more
    binding = {"batch": {"micro": "auto"}, "engine": {"memory": memory}, "precision": "fp32"}
    chosen, results = set(), []
    for engines in (1, 2, 4):  # each of several could hold larger ones
        trainer, events = trainer_of(
            case, recipe, tmp_path / str(engines), engines=engines, **binding
        )
        trainer.train()
        chosen.add((trainer._layout.micro_batch, trainer._layout.slot_bytes))
        results.append(([event.loss for event in events], trainer.store.content_hash()))
    assert chosen == {(2, None)}
    assert results == [results[0]] * 3
