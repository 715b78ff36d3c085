"""The same training on every device that this machine has: the CPU, and a GPU where there is one.

The reference is a plain PyTorch loop on the same device. Micro-batches are several, so that sums,
slots and the return of gradients are all at work; tied weights and dropout are among the cases.
"""

import fnmatch

import pytest
import torch
from grids import quick_first
from plain_training import Recipe, adamw, distance, streamed, trainer_of
from sweeps import compiled, sweep_and_let_go, weights_of
from tiny_models import IGNORED, language_model
from torch import nn

from penstock.engine import EnginePlan, target_of
from penstock.engine.cuda_graphs import CudaGraphs
from penstock.planning import memory_budget
from penstock.step.deferred_updates import DeferredUpdates

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
RECIPE = Recipe(steps=5, warmup_steps=1)
# AdamW makes steps of full size of gradients that are rounding noise (keys' biases): those are
# compared by losses alone.
NOISE = ("*attn.c_attn.bias", "*k_proj.bias", "*key.bias")
DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.15}


@pytest.fixture(params=DEVICES)
def device(request):
    was, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(was)


def plain_on(device, case, recipe):
    """Follow the recipe with autograd and `torch.optim.AdamW` on a device."""
    model = case.plain(recipe.seed).to(device)
    parameters = dict(model.named_parameters())
    optimizer = adamw(
        [
            {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
    )
    source, losses = case.data(recipe.seed), []
    for step in range(recipe.steps):
        batch = source.batch(step, range(recipe.size), recipe.size)
        rows = {name: torch.from_numpy(value).to(device) for name, value in batch.items()}
        count = int((rows["labels"] != IGNORED).sum())
        total = 0.0
        for begin in range(0, recipe.size, recipe.micro):
            part = {name: value[begin : begin + recipe.micro] for name, value in rows.items()}
            loss = case.loss(model, part)
            (loss / count).backward()
            total += float(loss.detach())
        losses.append(total / count)
        torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: parameter.detach().cpu() for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        ("gpt2", 0),
        ("llama", 1),
        # On the CPU: tests/integration/test_huggingface_checkpoints.py and test_exactness.py
        pytest.param("bert", 0, marks=pytest.mark.long),
        pytest.param("opt", 1, marks=pytest.mark.long),
        *(
            pytest.param(family, seed, marks=pytest.mark.slow)
            for family, seed in (("gpt2", 1), ("llama", 0), ("bert", 1), ("opt", 0))
        ),
    ],
)
def test_five_steps_agree_with_plain_pytorch_on_the_same_device(family, seed, device, tmp_path):
    case = language_model(family)
    recipe = Recipe(seed=seed, steps=RECIPE.steps, warmup_steps=RECIPE.warmup_steps)
    ours = streamed(case, recipe, tmp_path, engine={"device": device})
    losses, weights = plain_on(device, case, recipe)
    assert ours.losses == pytest.approx(losses, rel=5e-6)
    for name, weight in weights.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in NOISE):
            assert distance(ours.weights[name], weight) < 2e-3, name


@pytest.mark.parametrize("precision", quick_first(["fp32", "bf16"], ["bf16"]))
def test_resuming_recomputing_and_more_engines_keep_every_bit(precision, device, tmp_path):
    case = language_model("gpt2", **DROPOUT)

    def run(folder, until=None, recompute="never", engines=1):
        trainer, events = trainer_of(
            case,
            RECIPE,
            tmp_path / folder,
            until,
            precision=precision,
            engines=engines,
            engine={"device": device, "recompute": recompute},
        )
        trainer.train()
        return [event.loss for event in events], trainer.store.content_hash()

    losses, weights = run("whole")
    begun, _ = run("parts", until=2)
    ended, last = run("parts", engines=2)
    assert (begun + ended, last) == (losses, weights)
    assert run("recomputed", recompute="always") == (losses, weights)


@pytest.mark.long
def test_evaluation_between_steps_changes_no_bit(device, tmp_path):
    case = language_model("gpt2")
    hashes, seen = [], []
    for folder, every in (("without", None), ("with", 1)):
        trainer, _ = trainer_of(
            case,
            RECIPE,
            tmp_path / folder,
            engine={"device": device},
            evaluation={"every": every, "batches": 2},
        )
        trainer.train()
        seen.append(trainer.evaluate(2)["loss"])
        hashes.append(trainer.store.content_hash())
    assert hashes[0] == hashes[1]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("family", quick_first(["gpt2", "llama", "bert", "opt"], ["gpt2"]))
def test_recorded_steps_have_the_bits_of_computed_ones(family, device, tmp_path):
    """With evaluations between, which get the memory of the recording, and another share."""
    case, ends = language_model(family), []
    recipe = Recipe(steps=9, warmup_steps=1)
    for graphs in (True, False):
        trainer, events = trainer_of(
            case,
            recipe,
            tmp_path / str(graphs),
            precision="bf16",
            engine={"device": device, "cuda_graphs": graphs},
            evaluation={"every": 6, "batches": 1},
        )
        trainer.train()
        (engine,) = trainer.engines
        assert getattr(engine, "is_repeating", False) == (graphs and device == "cuda"), family
        ends.append(([event.loss for event in events], trainer.store.content_hash()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("family", quick_first(["gpt2", "llama"], ["gpt2"]))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_deferred_updates_change_no_bit(precision, family, device, tmp_path, monkeypatch):
    """With other numbers of them in each step, an evaluation between, and a checkpoint."""
    case, ends = language_model(family), []
    recipe = Recipe(steps=8, warmup_steps=1, clip_norm=0.5)
    for parts in ([0.0] * 8, [1.0, 0.4, 1.0, 0.1, 0.0, 0.7, 1.0, 1.0]):
        deferred, coming = [], iter(parts)

        def measured(self, *seconds, deferred=deferred, coming=coming):
            deferred.append(self._store.take_update_times().deferred_elements)
            self._elements = int(next(coming) * self._store.early_elements)
            self._store.defer(self._elements)
            return 0.0

        monkeypatch.setattr(DeferredUpdates, "measured", measured)
        trainer, events = trainer_of(
            case,
            recipe,
            tmp_path / str(len(ends)),
            precision=precision,
            engine={"device": device},
            evaluation={"every": 3, "batches": 1},
            checkpoint={"every": 4},
        )
        trainer.store.allow_early()
        trainer.train()
        assert bool(sum(deferred)) == bool(sum(parts))
        ends.append(([event.loss for event in events], trainer.store.content_hash()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("counted_bytes", [0, 1 << 20])
def test_store_streams_early_if_memory_was_counted_for_it(
    counted_bytes, device, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory_budget, "early_bytes", lambda *arguments: counted_bytes)
    trainer, _ = trainer_of(language_model("gpt2"), RECIPE, tmp_path, engine={"device": device})
    assert (trainer.store.early_elements > 0) == (counted_bytes > 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recordings_leave_no_memory_on_a_gpu():
    """Nor do the workspaces that matrix products have there."""
    module, rows, plan = Squares(), {"x": torch.ones(64, 256)}, EnginePlan()
    program = compiled(module, rows, device="cuda")
    engine, weights = target_of("cuda").make_engine(program, plan), weights_of(module, program)
    held = []
    for _ in range(3):
        for _ in range(3):
            sweep_and_let_go(engine, plan, weights, [rows])
        assert engine.is_repeating
        engine.release()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_can_be_released_after_a_call_that_waits_for_the_host():
    graphs = CudaGraphs(torch.device("cuda"))
    for _ in range(2):
        assert graphs.start(0)
        with pytest.raises(RuntimeError, match="captur"):
            graphs.record(lambda: torch.ones(1, device="cuda").item())
        graphs.drop()


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_memory_use_stays_below_the_prediction(device, tmp_path):
    from penstock.engine import predict_bytes

    case = language_model("gpt2")
    trainer, _ = trainer_of(case, RECIPE, tmp_path, engine={"device": device})
    trainer.train()
    plan, count = trainer._layout.plan, trainer._layout.micro_batches
    predicted = predict_bytes(trainer.program, count, plan, device).peak_bytes
    assert 0 < trainer.engines[0].memory.peak_bytes <= predicted
