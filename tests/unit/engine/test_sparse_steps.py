"""Steps with sparse weights: losses and gradients of a masked dense model, for every model family,
product, type and plan."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from grids import quick_first, thinned
from sparse_steps import (
    KERNELS,
    ONE_TILE,
    TILES,
    Pruned,
    assert_close,
    assert_is_reference,
    masks_of,
    measured,
    micro_batches_of,
    prune,
    pruned,
    pruned_case,
)
from sweeps import Step, gradients_by_weight, sweep
from tiny_models import language_model
from torch import nn
from torch.nn import functional as F

from penstock.compiler import fused_head
from penstock.engine import (
    Batch,
    EnginePlan,
    SparseProducts,
    SparseWeights,
    TorchEngine,
    sparse_weights,
)
from penstock.errors import ConfigError

CHOICES = {"kernels": KERNELS, "tiles": TILES, "one tile": ONE_TILE}


def in_blocks(name, parameter):
    return parameter.dim() == 2 and any(part.isdigit() for part in name.split("."))


def all_matrices(name, parameter):
    return parameter.dim() == 2


@functools.cache
def compiled(family, choose, **options) -> Pruned:
    """A model of the family with masks on the chosen parameters, compiled once."""
    return pruned_case(language_model(family), choose, **options)


def same_bits(first: Step, second: Step) -> None:
    assert first.losses == second.losses
    assert first.gradients.keys() == second.gradients.keys()
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name]), name


def plans_of(model: Pruned) -> list[EnginePlan]:
    everything = frozenset(range(len(model.program.stages) - 1))
    return [EnginePlan(), EnginePlan(everything), EnginePlan(frozenset({1}))]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_step_is_that_of_the_masked_dense_model(family, choice):
    model, batches = compiled(family, in_blocks), micro_batches_of(language_model(family))
    assert len(model.masks) >= 8
    assert {use.way for use in model.program.sparse_weights.values()} == {"sparse product"}
    assert_is_reference(model, model.step(batches, choice=CHOICES[choice]), batches)


def test_a_sparse_tied_head_is_a_product_and_its_embedding_masked_dense():
    model, batches = (
        compiled("gpt2", all_matrices, precision="fp32"),
        micro_batches_of(language_model("gpt2")),
    )
    ways = {name: use.way for name, use in model.program.sparse_weights.items()}
    assert ways.pop("transformer.wte.weight") == (
        "sparse product; masked dense, because aten.embedding reads it"
    )
    assert ways.pop("transformer.wpe.weight") == "masked dense, because aten.embedding reads it"
    assert set(ways.values()) == {"sparse product"}
    for choice in CHOICES.values():
        assert_is_reference(model, model.step(batches, choice=choice), batches)


def test_chunks_of_a_sparse_head_are_computed_alike_also_a_short_last_one(monkeypatch):
    """32 tokens in chunks of 7: the only choice is that of 7 tokens, and the last chunk has 4."""
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", 1)
    monkeypatch.setattr(fused_head, "_MIN_ROWS", 7)
    case = language_model("llama")
    model = pruned_case(case, lambda name, _: name == "lm_head.weight")
    assert model.program.sparse_weights["lm_head.weight"].product_tokens == (7,)
    batches = micro_batches_of(case)
    assert_is_reference(model, model.step(batches), batches)
    assert_is_reference(model, model.step(batches, dense_gradient=True), batches)


@pytest.mark.parametrize("family", quick_first(["gpt2", "llama"], ["gpt2"]))
def test_bfloat16_is_as_near_to_exact_as_the_dense_program(family):
    """Errors of sparse products in bfloat16 against those of dense ones on the same weights."""
    case = language_model(family)
    batches = micro_batches_of(case, 2)
    sparse = pruned_case(case, in_blocks, precision="bf16")
    dense = pruned_case(case, lambda *_: False, precision="bf16")
    prune(dense.module, sparse.masks)
    _, exact = sparse.reference(batches)
    ours, theirs = sparse.step(batches), dense.step(batches)
    assert ours.losses == pytest.approx(theirs.losses, rel=2**-7)
    for name, gradient in ours.gradients.items():
        expected, other = exact[name], theirs.gradients[name]
        if name in sparse.masks:
            assert sparse.program.weights[name].stream_dtype == torch.bfloat16
            expected, other = expected[sparse.masks[name]], other[sparse.masks[name]]
        assert gradient.dtype == torch.float32
        error, usual = (gradient - expected).norm(), (other - expected).norm()
        assert error <= 1.5 * usual + 1e-3 * expected.norm(), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "precision"), thinned(["gpt2", "llama"], ["fp32", "bf16"], others=pytest.mark.long)
)
def test_neither_the_number_of_engines_nor_recomputation_changes_a_bit(family, precision):
    model = compiled(family, all_matrices, precision=precision)
    batches = micro_batches_of(language_model(family))
    first = model.step(batches)
    for plan in plans_of(model)[1:]:
        same_bits(first, model.step(batches, plan))
    for engines in (2, 4):
        share = len(batches) // engines
        products = model.products()
        steps = [
            sweep(
                TorchEngine(model.program, EnginePlan(), sparse=products),
                EnginePlan(),
                model.weights(),
                batches[number * share : (number + 1) * share],
                first=number * share,
                total=len(batches),
            )
            for number in range(engines)
        ]
        nodes = {s.index: [n for one in steps for n in one.nodes[s.index]]
                 for s in model.program.stages}  # fmt: skip
        gradients = gradients_by_weight(model.program, nodes, len(batches))
        losses = [loss for one in steps for loss in one.losses]
        same_bits(first, Step(losses, gradients, nodes))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_with_dense_gradients_returns_those_of_all_elements(precision):
    model = compiled("gpt2", all_matrices, precision=precision)
    batches = micro_batches_of(language_model("gpt2"))
    step = model.step(batches, dense_gradient=True)
    usual = model.step(batches)
    assert step.losses == usual.losses
    _, exact = model.reference(batches)
    for name, gradient in step.gradients.items():
        if name not in model.masks:
            assert torch.equal(gradient, usual.gradients[name]), name
            continue
        assert (gradient.shape, gradient.dtype) == (model.masks[name].shape, torch.float32)
        if precision == "fp32":
            assert_close(gradient, exact[name], name)
            assert_close(gradient[model.masks[name]], usual.gradients[name], name)
        else:
            error = (gradient - exact[name]).norm()
            assert error <= 2**-5 * exact[name].norm() + 1e-6, name


class Unusual(nn.Module):
    """Products that models write in other ways than a linear layer, and a weight used twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.enter = nn.Linear(10, 24)
        self.w = nn.Parameter(torch.randn(24, 24) / 5)
        self.bias = nn.Parameter(torch.randn(24) / 5)
        self.leave = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, tokens, 10] to a loss []."""
        h = torch.tanh(self.enter(x))
        return (self.leave(torch.tanh(WAYS[self.kind](h, self.w, self.bias))) ** 2).mean()


def of_rows(function):
    """Apply a function of matrices to all tokens."""
    return lambda h, w, b: function(h.flatten(0, 1), w, b).unflatten(0, h.shape[:2])


WAYS = {
    "linear": lambda h, w, b: F.linear(h, w, b),
    "linear without bias": lambda h, w, b: F.linear(h, w) + b,
    "linear of the transposed weight": lambda h, w, b: F.linear(h, w.t(), b),
    "matmul": lambda h, w, b: h @ w + b,
    "matmul of the transposed weight": lambda h, w, b: h @ w.transpose(-1, -2) + b,
    "matmul of a permuted weight": lambda h, w, b: torch.matmul(h, w.permute(1, 0)) + b,
    "addmm": of_rows(lambda h, w, b: torch.addmm(b, h, w)),
    "addmm with one number as bias": of_rows(lambda h, w, b: torch.addmm(b[:1], h, w)),
    "addmm of the transposed weight": of_rows(lambda h, w, b: torch.addmm(b, h, w.T)),
    "mm": of_rows(lambda h, w, b: torch.mm(h, w) + b),
    "weight first": of_rows(lambda h, w, b: (w @ h.t()).t() + b),
    "transposed weight first": of_rows(lambda h, w, b: (w.t() @ h.t()).t() + b),
    "a vector": lambda h, w, b: h * (w @ h[0, 0]) + (h[0, 1] @ w) + b,
    "used twice": lambda h, w, b: F.linear(torch.tanh(F.linear(h, w, b)), w),
    "used in both directions": lambda h, w, b: F.linear(torch.tanh(h @ w), w, b),
}
DENSE_WAYS = {
    "scaled addmm": (of_rows(lambda h, w, b: torch.addmm(b, h, w, alpha=2.0)), "aten.addmm"),
    "scaled": (lambda h, w, b: F.linear(h, w * 2, b), "aten.mul"),
    "cut": (lambda h, w, b: F.linear(h, torch.cat([w[12:], w[:12]]), b), "aten.slice"),
    "batched": (lambda h, w, b: torch.bmm(h, w.expand(h.shape[0], -1, -1)) + b, "aten.expand"),
    "with itself": (lambda h, w, b: h @ (w @ w) + b, "aten.matmul"),
    "detached": (lambda h, w, b: F.linear(h, w.detach(), b) + (w * w).sum(), "aten.detach"),
    "a bias and a product": (lambda h, w, b: F.linear(h, w, b) + w[0], "aten.select"),
}
WAYS |= {name: way for name, (way, _) in DENSE_WAYS.items()}


def unusual(kind: str, precision: str = "fp32", **options) -> tuple[Pruned, list]:
    module = Unusual(kind)
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(2, 9, 10, generator=generator)} for _ in range(3)]
    masks = masks_of({"w": (24, 24), "leave.weight": (3, 24)})
    return pruned(module, batches[0], masks, precision=precision, **options), batches


@pytest.mark.parametrize("kind", WAYS)
def test_products_in_every_spelling(kind):
    model, batches = unusual(kind)
    use = model.program.sparse_weights["w"]
    if kind not in DENSE_WAYS:
        assert use.way == "sparse product"
    else:
        assert DENSE_WAYS[kind][1] in use.dense_readers
    assert_is_reference(model, model.step(batches), batches)
    assert_is_reference(model, model.step(batches, plans_of(model)[1]), batches)
    assert_is_reference(model, model.step(batches, dense_gradient=True), batches)


def test_a_sparse_bias_and_a_sparse_tensor_of_four_dimensions_are_masked_dense():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(2, 6, 3)
            self.head = nn.Linear(6 * 36, 4)

        def forward(self, x):
            return (self.head(torch.relu(self.conv(x)).flatten(1)) ** 2).mean()

    module, x = Network(), torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    shapes = {"conv.weight": (6, 2, 3, 3), "head.bias": (4,), "head.weight": (4, 216)}
    model = pruned(module, {"x": x}, masks_of(shapes, density=0.5))
    ways = {name: use.way for name, use in model.program.sparse_weights.items()}
    assert ways["conv.weight"] == "masked dense, because aten.conv2d reads it"
    assert ways["head.bias"].startswith("masked dense, because ")
    assert ways["head.weight"] == "sparse product"
    assert_is_reference(model, model.step([{"x": x}]), [{"x": x}])


def test_frozen_sparse_weights_have_no_gradient_and_pass_it_on():
    model, batches = unusual("linear", freeze=("w",))
    step = model.step(batches)
    assert "w" not in step.gradients
    model.module.w.requires_grad_(False)
    assert_is_reference(model, step, batches)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_masks_that_keep_nothing_or_everything(density):
    module = Unusual("matmul")
    generator = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(2, 9, 10, generator=generator)}]
    masks = {"w": torch.full((24, 24), bool(density))}
    model = pruned(module, batches[0], masks)
    step = model.step(batches)
    assert step.gradients["w"].shape == (int(masks["w"].sum()),)
    assert_is_reference(model, step, batches)


def test_one_token_is_multiplied_as_a_vector_without_a_choice():
    """An inference program for one token, as text generation computes it."""
    for kind in ("linear", "matmul", "addmm"):
        module = Unusual(kind)
        rows = {"x": torch.randn(1, 1, 10, generator=torch.Generator().manual_seed(2))}
        model = pruned(module, rows, masks_of({"w": (24, 24)}), training=False)
        nothing = SparseWeights(SparseProducts())
        engine = TorchEngine(model.program, EnginePlan(), sparse=nothing)
        found = inferred(engine, model.weights(), rows)
        assert_close(found, module(**rows).detach(), kind)


def inferred(engine, weights, rows) -> torch.Tensor:
    engine.begin(Batch([rows], 0, 1, 0, 0))
    for stage in engine.program.stages:
        engine.load(stage.index, [weights[name] for name in stage.weights])
        engine.infer(stage.index)
    ((result,),) = engine.results()
    return result


def test_evaluation_computes_the_loss_of_the_training_step():
    case = language_model("llama")
    model = compiled("llama", all_matrices, precision="fp32")
    rows, *_ = micro_batches_of(case)
    evaluating = pruned_case(case, all_matrices, training=False)
    assert not any(spec.trainable for spec in evaluating.program.weights.values())
    engine = TorchEngine(evaluating.program, EnginePlan(), sparse=evaluating.products())
    assert float(inferred(engine, evaluating.weights(), rows)) == model.step([rows]).losses[0]


def test_a_changed_mask_is_taken_when_its_version_rises():
    model, batches = unusual("linear")
    plan = EnginePlan()
    changed = dataclasses.replace(
        model, masks=masks_of({"w": (24, 24), "leave.weight": (3, 24)}, density=0.33, seed=5)
    )
    both = measured(model.program, model.masks, KERNELS)
    products = both.products
    sparsities = {name: [1 - float(m.float().mean())] for name, m in changed.masks.items()}
    products.measure(products.cases(model.program, sparsities))
    engine = TorchEngine(model.program, plan, sparse=both)
    sweep(engine, plan, model.weights(version=3), batches)
    for name, parameter in changed.module.named_parameters():
        if name in changed.masks:
            parameter.data = torch.randn_like(parameter) * changed.masks[name]
    weights = changed.weights(version=4)
    assert weights["w"].values.numel() != model.weights()["w"].values.numel()
    assert_is_reference(changed, sweep(engine, plan, weights, batches), batches)
    with pytest.raises(ValueError, match=r"a changed mask needs a new version"):
        sweep(engine, plan, model.weights(version=4), batches)


def test_layouts_are_made_once_for_all_micro_batches_sweeps_and_engines(monkeypatch):
    made = []
    original = sparse_weights.layout_of
    monkeypatch.setattr(
        sparse_weights, "layout_of", lambda w: made.append((w.name, w.version)) or original(w)
    )
    model, batches = unusual("used twice")
    plan, shared = EnginePlan(), model.products()
    for version in (0, 0, 1):
        for _ in range(2):
            engine = TorchEngine(model.program, plan, sparse=shared)
            sweep(engine, plan, model.weights(version), batches)
    assert sorted(made) == [("leave.weight", 0), ("leave.weight", 1), ("w", 0), ("w", 1)]


def test_an_engine_without_choices_refuses_sparse_weights():
    model, batches = unusual("linear")
    with pytest.raises(ConfigError, match=r"expected SparseWeights for the sparse weights of pru"):
        TorchEngine(model.program, EnginePlan())
    engine = TorchEngine(model.program, EnginePlan(), sparse=measured(model.program, {
        name: torch.ones_like(mask) for name, mask in model.masks.items()}, KERNELS))  # fmt: skip
    with pytest.raises(
        ConfigError,
        match=r"expected a recorded choice for 24 x 24 float32, 18 tokens, sparsity 0\.\d+, got",
    ):
        sweep(engine, EnginePlan(), model.weights(), batches)
