"""Where stages end changes no bit: not of the losses, not of the weights, and no dropout's mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_training import Recipe, trainer_of
from sweeps import sweep
from tiny_models import (
    FIELDS,
    LENGTH,
    Case,
    language_model,
    mean_squared_error,
)
from torch import nn

from penstock.engine import EnginePlan, TorchEngine
from penstock.models import InputSpec, ModelSource
from penstock.planning import builders

GPT = {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.15}
DROPOUT = {
    "gpt2": GPT,
    "gptj": GPT,
    "opt": {"dropout": 0.2, "attention_dropout": 0.15},
    "llama": {"attention_dropout": 0.2},
    "qwen3": {"attention_dropout": 0.2},
    "bert": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1},
}
# What one stage's weights may take: all blocks whole, then cut smaller and smaller.
SLOTS = {"fp32": (None, 20_000, 17_000), "bf16": (None, 20_000, 8_500)}


NAMES = [f"layer_{letter}" for letter in "abcdefghijklmnopqrst"]


class Dropping(nn.Module):
    """Layers without containers, in which every value is read four times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(6, 24), nn.Linear(24, 2), nn.Dropout(0.3)
        for name in NAMES:
            setattr(self, name, nn.Linear(24, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, 6] to [rows, 2]."""
        x = self.first(x)
        for one, other in zip(NAMES[::2], NAMES[1::2], strict=True):
            gate = torch.sigmoid(getattr(self, other)(x)) * torch.tanh(x)
            x = x + self.drop(getattr(self, one)(x)) * gate
        return self.last(x)


def dropping() -> Case:
    """The case of a model whose stages are chosen by bytes alone."""

    def rows(seed: int) -> dict[str, np.ndarray]:
        x = np.random.default_rng(seed).standard_normal((64, 6)).astype(np.float32)
        return {"x": x, "y": np.stack([np.sin(x).sum(1), x.prod(1)], axis=1)}

    source = ModelSource.from_factory(
        "test_stage_cuts:Dropping",
        loss=mean_squared_error,
        inputs={"x": InputSpec((6,))},
        targets={"y": InputSpec((2,))},
    )
    return Case(
        "dropping",
        Dropping,
        lambda seed: source,
        lambda model, batch: mean_squared_error(model(batch["x"]), batch["y"]),
        rows,
        summed=False,
    )


def swept(case: Case, precision: str, slot_bytes: int | None, recompute: bool = False):
    """Do one step of a case, its stages cut to so many bytes; return it, and how many there are."""
    program = builders.compile_source(
        case.source(0),
        micro_batch=2,
        length=LENGTH,
        precision=precision,
        device="cpu",
        slot_bytes=slot_bytes,
    )
    parameters = dict(case.plain(0).named_parameters())
    weights = {
        name: parameters[name].detach().to(spec.stream_dtype)
        for name, spec in program.weights.items()
    }
    rows = case.arrays(0)
    micro_batches = [
        {name: torch.from_numpy(value[2 * i : 2 * i + 2]) for name, value in rows.items()}
        for i in range(3)
    ]
    last = len(program.stages) - 1
    plan = EnginePlan(frozenset(range(last)) if recompute else frozenset())
    return sweep(TorchEngine(program, plan), plan, weights, micro_batches, seed=3, step=5), last + 1


def require_equal(found, wanted) -> None:
    assert found.losses == wanted.losses
    assert found.gradients.keys() == wanted.gradients.keys()
    differ = [n for n, g in wanted.gradients.items() if not torch.equal(found.gradients[n], g)]
    assert not differ


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FIELDS))
@pytest.mark.parametrize("precision", SLOTS)
@pytest.mark.parametrize("drops", [False, True])
def test_cut_blocks_give_the_bits_of_whole_blocks(family, precision, drops):
    case = language_model(family, **(DROPOUT[family] if drops else {}))
    whole, stages = swept(case, precision, None)
    counts = [stages]
    for slot_bytes in SLOTS[precision][1:]:
        found, stages = swept(case, precision, slot_bytes, recompute=stages > counts[0])
        require_equal(found, whole)
        counts.append(stages)
    assert counts[-1] > counts[0] == 4  # the embedding, two blocks that share a kind, the head


@pytest.mark.long
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_model_without_containers_can_be_cut_into_any_number_of_stages(precision):
    case, layer_bytes = dropping(), 24 * 25 * (4 if precision == "fp32" else 2)
    whole, fewest = swept(case, precision, None)
    found, stages = swept(case, precision, layer_bytes, recompute=True)
    require_equal(found, whole)
    assert stages >= len(NAMES) > fewest > 1


@pytest.mark.long
def test_other_engine_memory_gives_the_same_bits(tmp_path):
    """The whole way: what an engine may use decides how many stages there are, and nothing else."""
    case = language_model("gpt2", n_embd=128, **GPT)
    recipe = Recipe(seed=0, steps=3, warmup_steps=0, size=2, micro=1)
    found, stages = [], []
    for memory, engines in (("64MiB", 1), ("2MiB", 2)):
        trainer, events = trainer_of(
            case,
            recipe,
            tmp_path / f"{memory}-{engines}",
            engine={"memory": memory},
            engines=engines,
        )
        trainer.train()
        found.append(([event.loss for event in events], trainer.store.content_hash()))
        stages.append(len(trainer.program.stages))
    assert found[0] == found[1]
    assert stages[0] < stages[1]
