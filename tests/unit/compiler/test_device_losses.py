"""Losses of logits on a GPU, by Penstock's kernel and by PyTorch's operators, beside float64."""

import pytest
import torch

from penstock.compiler import device_losses, fused_head
from penstock.constants import IGNORED_LABEL

HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", *(["cuda"] if HAS_GPU else [])]
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2**-8}


def rows_of(columns, dtype, device, rows=5, apart=0):
    """Return logits [rows, columns] with `apart` elements between rows, and labels."""
    torch.manual_seed(columns)
    logits = torch.randn(rows, columns + apart, dtype=torch.float64) * 4
    labels = torch.randint(columns, (rows,))
    labels[1] = IGNORED_LABEL
    return logits.to(dtype).to(device)[:, :columns], labels.to(device)


def by_float64(logits, labels, factor):
    exact = logits.detach().cpu().double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        exact, labels.cpu(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    (gradient,) = torch.autograd.grad(losses.sum() * factor, exact)
    return losses.detach(), gradient


def operators(logits, labels, ignore_index, factor):
    return device_losses._by_operators(logits, labels, ignore_index, factor)


WAYS = [
    *(pytest.param(operators, device, id=f"operators-{device}") for device in DEVICES),
    *([pytest.param(device_losses.cross_entropy_and_gradient, "cuda", id="kernel")] * HAS_GPU),
]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("columns", "apart"), [(1, 0), (7, 1), (4096, 0), (4097, 15), (50257, 15)])
@pytest.mark.parametrize(("way", "device"), WAYS)
def test_losses_and_gradients_are_those_of_float64(way, device, columns, apart, dtype):
    logits, labels = rows_of(columns, dtype, device, apart=apart)
    losses, gradient = by_float64(logits, labels, 0.25)
    between = logits.as_strided((5, columns + apart), (columns + apart, 1))[:, columns:].clone()
    found = way(logits, labels, IGNORED_LABEL, torch.tensor(0.25, device=device))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), losses, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(
        logits.cpu().double(), gradient, rtol=BOUNDS[dtype], atol=BOUNDS[dtype] / 1e3
    )
    rest = logits.as_strided((5, columns + apart), (columns + apart, 1))[:, columns:]
    assert torch.equal(rest, between)


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
class TestKernel:
    """What only the kernel can get wrong."""

    def test_losses_without_gradients_have_the_same_bits_and_leave_the_logits(self):
        logits, labels = rows_of(50257, torch.bfloat16, "cuda")
        before = logits.clone()
        losses = device_losses.cross_entropy(logits, labels, IGNORED_LABEL)
        assert torch.equal(logits, before)
        factor = torch.tensor(1.0, device="cuda")
        with_gradients = device_losses.cross_entropy_and_gradient(
            logits, labels, IGNORED_LABEL, factor
        )
        assert torch.equal(losses, with_gradients)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("place", [0, 3, 5000])
    def test_loss_of_a_row_with_a_number_that_is_not_finite_is_nan(self, value, place):
        logits, labels = rows_of(5001, torch.float32, "cuda")
        logits[2, place] = value
        losses = device_losses.cross_entropy(logits, labels, IGNORED_LABEL)
        assert losses.isnan().tolist() == [False, False, True, False, False]

    def test_a_logit_may_be_minus_infinity(self):
        logits, labels = rows_of(4100, torch.float32, "cuda")
        logits[:, 1::2] = float("-inf")
        labels[labels >= 0] = 0
        losses, gradient = by_float64(logits, labels, 1.0)
        factor = torch.tensor(1.0, device="cuda")
        found = device_losses.cross_entropy_and_gradient(logits, labels, IGNORED_LABEL, factor)
        torch.testing.assert_close(found.cpu().double(), losses, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(logits.cpu().double(), gradient, rtol=2e-6, atol=1e-8)

    @pytest.mark.parametrize("label", [-1, 50])
    def test_loss_of_a_label_that_does_not_exist_is_nan(self, label):
        logits, labels = rows_of(50, torch.float32, "cuda")
        labels[0] = label
        assert device_losses.cross_entropy(logits, labels, IGNORED_LABEL)[0].isnan()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_padded_weight_changes_no_result(device, has_bias, monkeypatch):
    """A GPU's products are of a padded weight: here on every device, and in several chunks."""
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", 4099 * 4 * 64)
    torch.manual_seed(0)
    hidden, weight = torch.randn(150, 16), torch.randn(4099, 16)
    bias = torch.randn(4099) if has_bias else None
    labels = torch.randint(4099, (150,))
    labels[::7] = IGNORED_LABEL
    arguments = [None if t is None else t.to(device) for t in (hidden, weight, bias, labels)]
    scale = torch.tensor(0.5, device=device)

    def results(is_padded):
        monkeypatch.setattr(fused_head, "_is_padded", lambda weight: is_padded)
        loss = fused_head.loss_sum(*arguments, IGNORED_LABEL)
        predictions = fused_head.loss_sum_and_predictions(*arguments, IGNORED_LABEL)[1]
        return [
            loss,
            predictions,
            *fused_head.loss_sum_and_gradients(scale, *arguments, IGNORED_LABEL, True),
        ]

    for plain, padded in zip(results(False), results(True), strict=True):
        assert plain.shape == padded.shape
        torch.testing.assert_close(padded, plain, rtol=1e-4, atol=1e-5)
