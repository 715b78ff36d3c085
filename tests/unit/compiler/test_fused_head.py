"""The head and its loss in one operator: the values and gradients of PyTorch's own two."""

from fnmatch import fnmatch

import pytest
import torch
from grids import thinned
from real_allocations import peak_allocated_bytes
from sweeps import compiled, one_step, sweep, weights_of
from torch import nn
from torch.nn import functional as F

from penstock.compiler import fused_head
from penstock.engine import Batch, EnginePlan, TorchEngine

TOKENS, WIDTH, VOCABULARY = 200, 12, 37


class Head(nn.Module):
    """A layer, then a head with its loss."""

    def __init__(self, *, bias=True, reduction="mean", ignore_index=-100, smoothing=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.options = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": smoothing,
        }

    def forward(self, x, labels):
        logits = self.head(torch.tanh(self.body(x)))
        return F.cross_entropy(logits.float(), labels, **self.options)


def rows_of(seed, ignore_index=-100, share=0.2):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    ignored = torch.rand(TOKENS, generator=generator) < share
    return {
        "x": 2 * torch.randn(TOKENS, WIDTH, generator=generator),
        "labels": labels.masked_fill(ignored, ignore_index),
    }


def is_fused(program, name="penstock.linear_cross_entropy"):
    return any(
        name in str(node.target)
        for stage in program.stages
        for node in stage.kind.graphs["infer"].nodes
    )


CHUNKS = (7, 64, TOKENS, 10**6)


@pytest.fixture(params=CHUNKS, ids="chunks of {}".format)
def chunks(request, monkeypatch):
    """Cut the tokens into chunks of that many rows: odd ones, a last one that is short, one."""
    monkeypatch.setattr(fused_head, "_MIN_ROWS", 1)
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", request.param * VOCABULARY * 4)
    return request.param


OPTIONS = (
    {},
    {"bias": False},
    {"reduction": "sum"},
    {"reduction": "sum", "bias": False, "ignore_index": 5},
    {"ignore_index": 0},
)


@pytest.mark.parametrize(
    ("options", "chunks", "seed"),
    thinned(OPTIONS, CHUNKS, range(2)),
    indirect=["chunks"],
    ids=str,
)
def test_losses_and_gradients_equal_pytorch(options, seed, chunks):
    module, rows = Head(**options), rows_of(seed, options.get("ignore_index", -100))
    assert is_fused(compiled(module, rows))
    for plan in (EnginePlan(), EnginePlan(recompute=frozenset({0, 1}))):
        step = one_step(module, [rows], plan)
        module.zero_grad()
        loss = module(**rows)
        loss.backward()
        assert step.losses[0] == pytest.approx(float(loss.detach()), rel=1e-6)
        for name, parameter in module.named_parameters():
            scale = float(parameter.grad.abs().max())
            assert float((step.gradients[name] - parameter.grad).abs().max()) <= 2e-6 * scale, name


def test_head_that_is_not_last_is_differentiated_separately(chunks):
    """Where more follows the loss, its forward and its backward are two operators."""

    class Regularised(Head):
        def forward(self, x, labels):
            return super().forward(x, labels) ** 2

    module, rows = Regularised(), rows_of(3)
    assert is_fused(compiled(module, rows))
    step = one_step(module, [rows])
    loss = module(**rows)
    loss.backward()
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, parameter in module.named_parameters():
        assert torch.allclose(step.gradients[name], parameter.grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("freeze", ["head.weight", "head.*", "body.*", "head.bias"])
def test_frozen_heads_pass_gradients_on(freeze):
    module, rows = Head(), rows_of(1)
    step = one_step(module, [rows], freeze=(freeze,))
    loss = module(**rows)
    loss.backward()
    trained = {name for name, _ in module.named_parameters() if not fnmatch(name, freeze)}
    assert step.gradients.keys() == trained
    for name, parameter in module.named_parameters():
        if name in trained:
            assert torch.allclose(step.gradients[name], parameter.grad, rtol=1e-4, atol=1e-7), name


def test_summed_loss_without_labels_is_zero():
    module = Head(reduction="sum")
    rows = rows_of(0) | {"labels": torch.full((TOKENS,), -100)}
    step = one_step(module, [rows])
    assert step.losses == [0.0]
    assert all(not gradient.any() for gradient in step.gradients.values())


def test_bfloat16_error_is_near_that_of_pytorch(chunks):
    module, rows = Head(reduction="sum"), rows_of(4)
    exact = module(**rows)
    exact.backward()
    step = one_step(module, [rows], precision="bf16")
    other = Head(reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        other(**rows).backward()
    assert step.losses[0] == pytest.approx(float(exact.detach()), rel=2**-8)
    for (name, parameter), cast in zip(module.named_parameters(), other.parameters(), strict=True):
        ours = (step.gradients[name] - parameter.grad).norm()
        theirs = (cast.grad - parameter.grad).norm()
        assert ours <= 2.0 * theirs, name


def test_unsupported_head_is_not_fused():
    module, rows = Head(smoothing=0.1), rows_of(2)
    assert not is_fused(compiled(module, rows))
    step = one_step(module, [rows])
    assert step.losses[0] == pytest.approx(float(module(**rows).detach()), rel=1e-6)


def test_full_logits_are_never_allocated(monkeypatch):
    """No tensor of the step is as large as tokens x vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(fused_head, "CHUNK_BYTES", 64 * VOCABULARY * 4)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            results = function(*args, **(kwargs or {}))
            for value in results if isinstance(results, (tuple, list)) else (results,):
                if isinstance(value, torch.Tensor):
                    largest = max(largest, value.untyped_storage().nbytes())
            return results

    module, rows = Head(), rows_of(0)
    program, plan = compiled(module, rows), EnginePlan()
    with Watch():
        sweep(TorchEngine(program, plan), plan, weights_of(module, program), [rows])
    assert 0 < largest < TOKENS * VOCABULARY * 4 // 2


def run_forward(program, module, rows):
    """Return what a program that is only run forward gives for one micro-batch."""
    engine = TorchEngine(program, EnginePlan(), device="cpu", budget_bytes=1 << 30)
    weights = weights_of(module, program)
    engine.begin(Batch([rows], 0, 1, 0, 0))
    for stage in program.stages:
        engine.load(stage.index, [weights[name] for name in stage.weights])
        engine.infer(stage.index)
    return engine.results()[0]


class Predicting(Head):
    """As `Head`, with what an evaluation asks for besides."""

    def __init__(self, over=-1, **options):
        super().__init__(reduction="sum", **options)
        self.over = over

    def forward(self, x, labels):
        logits = self.head(torch.tanh(self.body(x))).float()
        return F.cross_entropy(logits, labels, **self.options), logits.argmax(self.over)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bias", [True, False])
def test_predictions_are_argmax_and_do_not_change_the_loss(precision, bias, chunks):
    module, rows = Predicting(bias=bias), rows_of(6)
    program = compiled(module, rows, training=False, precision=precision)
    assert is_fused(program, "penstock.linear_cross_entropy_predictions")
    loss, predictions = run_forward(program, module, rows)
    alone = Head(reduction="sum", bias=bias)
    plain = compiled(alone, rows, training=False, precision=precision)
    assert torch.equal(loss, run_forward(plain, alone, rows)[0])
    cast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with cast, torch.no_grad():
        assert torch.equal(predictions, module(**rows)[1])


def test_argmax_over_tokens_is_not_fused_as_prediction():
    module, rows = Predicting(over=0), rows_of(6)
    program = compiled(module, rows, training=False)
    assert not is_fused(program)
    loss, most = run_forward(program, module, rows)
    expected = module(**rows)
    assert float(loss) == pytest.approx(float(expected[0].detach()), rel=1e-6)
    assert torch.equal(most, expected[1])


@pytest.mark.parametrize(
    ("dtype", "products", "vocabulary", "stride"),
    [
        (torch.float32, "torch", 5001, 5008),
        (torch.float32, "torch+float32", 5001, 5008),
        (torch.float32, "torch", 5008, 5008),
        (torch.float32, "torch", 37, 37),
        (torch.float32, "onednn", 5001, 5001),
        (torch.bfloat16, "torch", 5001, 5008),
        (torch.bfloat16, "onednn", 5001, 5008),
        (torch.bfloat16, "torch+float32", 5001, 5001),
    ],
)
def test_rows_of_logits_are_aligned_where_pytorch_writes_them(dtype, products, vocabulary, stride):
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, WIDTH).to(dtype), torch.randn(vocabulary, WIDTH).to(dtype)
    logits = fused_head._DenseWeight(weight, products).logits(hidden, 6)
    assert (logits.shape, logits.stride()) == ((6, vocabulary), (stride, 1))
    torch.testing.assert_close(logits, hidden @ weight.t(), rtol=1e-5, atol=1e-5)
    counted = fused_head.chunk_bytes(hidden, vocabulary)
    assert logits.untyped_storage().nbytes() <= counted <= 1.01 * logits.nbytes


@pytest.mark.parametrize("rows", [70, 35, 32])
@pytest.mark.parametrize("products", ["torch", "onednn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_the_same_however_products_are_prepared(
    dtype, products, rows, monkeypatch
):
    """In one, two and three chunks; the plain way has no aligned rows."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, WIDTH).to(dtype), torch.randn(5001, WIDTH).to(dtype)
    bias, labels = torch.randn(5001).to(dtype), torch.randint(5001, (70,))
    given = (torch.tensor(0.5), hidden, weight, bias, labels, -100, True, products)
    monkeypatch.setattr(fused_head, "chunk_rows", lambda *_: rows)
    prepared = fused_head.loss_sum_and_gradients(*given)
    assert all(gradient.is_contiguous() for gradient in prepared)
    monkeypatch.setattr(fused_head, "_LEAST_ALIGNED", 10_000)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    for ours, others in zip(prepared, fused_head.loss_sum_and_gradients(*given), strict=True):
        torch.testing.assert_close(ours, others, **tolerance)


def test_gradient_of_two_chunks_is_rounded_once(monkeypatch):
    torch.manual_seed(1)
    hidden, weight = torch.randn(8, WIDTH).bfloat16(), torch.randn(64, WIDTH).bfloat16()
    labels = torch.randint(64, (8,))

    def gradient(rows, chunk):
        monkeypatch.setattr(fused_head, "chunk_rows", lambda *_: chunk)
        given = (torch.tensor(1.0), hidden[rows], weight, None, labels[rows], -100, True)
        return fused_head.loss_sum_and_gradients(*given)[2]

    whole = gradient(slice(0, 8), 4)
    parts = [gradient(rows, 4).float() for rows in (slice(0, 4), slice(4, 8))]
    assert torch.equal(whole, (parts[0] + parts[1]).bfloat16())


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("products", ["torch", "onednn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "labels"), [(600, 5001), (1800, 2000), (400, 9001)])
def test_allocations_of_a_head_stay_below_what_is_counted(
    tokens, labels, dtype, products, chunks, monkeypatch
):
    """Of several bands and of one; of a product that is a sum of bands, and one with a copy."""
    monkeypatch.setattr(fused_head, "chunk_rows", lambda *_: -(-tokens // chunks))
    hidden, weight = torch.randn(tokens, 256).to(dtype), torch.randn(labels, 256).to(dtype)
    given = (torch.tensor(1.0), hidden, weight, None, torch.randint(labels, (tokens,)), -100, True)

    def act():
        return fused_head.loss_sum_and_gradients(*given, products)

    results = sum(tensor.nbytes for tensor in act())
    counted = results + fused_head.scratch_bytes(hidden, weight, True, products)
    peak = peak_allocated_bytes(act)
    assert 0.8 * counted <= peak
    assert peak <= 1.02 * counted + (200_000 if dtype == torch.float32 else 1_300_000)
