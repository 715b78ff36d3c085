"""Dropout: it drops, anew in every place and step, and evaluation knows nothing of it."""

import pytest
import torch
from plain_training import Recipe, trainer_of
from sweeps import compiled, sweep, weights_of
from tiny_models import ROWS, language_model, with_rows
from torch import nn

from penstock.engine import EnginePlan, TorchEngine


class Columns(nn.Module):
    """Returns its inputs' dropped values where a test can see them: as its gradients."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(probability) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Layer(nn.Module):
    """Adds two dropped rows of its weight to x; the weight's gradient is the sum of its masks."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4096))
        self.drop = nn.Dropout(probability)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.weight[0].expand_as(x)) + self.drop(self.weight[1].expand_as(x))


def masks(probability, *, seed=0, step=0, micro_batches=1, recompute=frozenset()):
    """Return the masks that a step applies, [micro-batches, layers, 2, 4096]."""
    x, module, plan = torch.zeros(1, 4096), Columns(probability), EnginePlan(recompute)
    program = compiled(module, {"x": x})
    found = []
    for number in range(micro_batches):
        step_of_one = sweep(
            TorchEngine(program, plan),
            plan,
            weights_of(module, program),
            [{"x": x}],
            first=number,
            total=micro_batches,
            seed=seed,
            step=step,
        )
        found.append(
            torch.stack(
                [
                    node.tensors[0]
                    for index in sorted(step_of_one.nodes)
                    for node in step_of_one.nodes[index]
                    if node.tensors
                ]
            )
        )
    return torch.stack(found)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_dropout_drops_the_given_share_and_scales_the_rest(probability):
    found = masks(probability, micro_batches=2)
    kept = found != 0
    assert torch.allclose(found[kept], torch.tensor(1 / (1 - probability)))
    share = 1 - kept.double().mean()
    deviation = (probability * (1 - probability) / kept.numel()) ** 0.5
    assert abs(share - probability) < 4 * deviation


def test_every_layer_position_micro_batch_step_and_seed_has_its_own_mask():
    found = [
        *masks(0.5, micro_batches=3).flatten(0, 2),
        *masks(0.5, step=1).flatten(0, 2),
        *masks(0.5, seed=1).flatten(0, 2),
    ]
    kept = torch.stack(found).ne(0).double()
    agree = kept @ kept.T + (1 - kept) @ (1 - kept).T
    apart = agree[~torch.eye(len(found), dtype=torch.bool)] / 4096
    assert len(found) == 20
    # Independent masks agree in half of the elements, with a deviation of 0.5 / 64.
    assert float(apart.min()) > 0.5 - 5 / 128
    assert float(apart.max()) < 0.5 + 5 / 128


def test_forward_backward_and_recomputation_use_the_same_mask():
    assert torch.equal(masks(0.5, recompute=frozenset({0})), masks(0.5))
    assert torch.equal(masks(0.5), masks(0.5))


@pytest.mark.long
def test_evaluation_has_no_dropout(tmp_path):
    """The held-out loss is that of the plain model in evaluation mode, on the same rows."""
    dropout = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    case, recipe = language_model("gpt2", **dropout), Recipe(steps=2, warmup_steps=0)
    held_out = case.arrays(1)
    trainer, _ = trainer_of(with_rows(case, held_out), recipe, tmp_path)
    found = trainer.evaluate(batches=ROWS // recipe.size)
    assert found == trainer.evaluate(batches=ROWS // recipe.size)
    model = case.plain(recipe.seed).eval()
    rows = {name: torch.from_numpy(value) for name, value in held_out.items()}
    with torch.no_grad():
        expected = float(case.loss(model, rows)) / int((rows["labels"] != -100).sum())
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    model.train()
    torch.manual_seed(0)
    with torch.no_grad():
        dropped = float(case.loss(model, rows)) / int((rows["labels"] != -100).sum())
    assert found["loss"] != pytest.approx(dropped, rel=1e-4)
    trainer.train()  # and training still drops after an evaluation
    again, _ = trainer_of(with_rows(case, held_out), recipe, tmp_path / "again")
    again.train()
    assert again.store.content_hash() == trainer.store.content_hash()


def test_model_compiled_in_evaluation_mode_has_no_dropout():
    x = torch.zeros(1, 4096)
    assert compiled(Columns(0.5), {"x": x}).draws_dropout
    assert not compiled(Columns(0.5).eval(), {"x": x}).draws_dropout
    assert not compiled(Columns(0.0), {"x": x}).draws_dropout
