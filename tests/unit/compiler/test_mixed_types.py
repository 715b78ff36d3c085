"""In bf16, float32 inputs and buffers meet bfloat16 weights: the operators accept both."""

import pytest
import torch
from sweeps import one_step
from torch import nn
from torch.nn import functional as F


class Attends(nn.Module):
    """PyTorch's own layers, with a mask of float32."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        mask = torch.full((8, 8), float("-inf")).triu(1)
        return self.layer(x[:, 0], src_mask=mask).square().mean()


class HasStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4).eval()
        self.norm.running_var.fill_(0.3)

    def forward(self, x):
        return self.norm(self.convolution(x)).square().mean()


class SamplesAtPositions(HasStatistics):
    def forward(self, x):
        places = torch.linspace(-1, 1, 36).view(1, 6, 3, 2).expand(2, -1, -1, -1)
        sampled = F.grid_sample(self.convolution(x), places, align_corners=False)
        return sampled.square().mean() + 0 * self.norm.weight.sum() + 0 * self.norm.bias.sum()


@pytest.mark.parametrize("make", [Attends, HasStatistics, SamplesAtPositions])
def test_mixed_types_are_computed_in_bf16(make):
    torch.manual_seed(0)
    module, rows = make(), {"x": torch.randn(2, 3, 8, 8)}
    step = one_step(module, [rows], precision="bf16")
    loss = module(**rows)
    loss.backward()
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=0.02)
    largest = max(float(parameter.grad.abs().max()) for parameter in module.parameters())
    for name, parameter in module.named_parameters():
        difference = (step.gradients[name].float() - parameter.grad).abs().max()
        assert float(difference) <= 0.03 * largest, name


class Decomposes(nn.Module):
    """A function of symmetric positive definite matrices, which are bfloat16 in such a program."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(9, 9), function

    def forward(self, x):
        factor = self.layer(x).view(-1, 3, 3)
        made = self.function(factor @ factor.mT + torch.eye(3, dtype=factor.dtype))
        return made.square().mean()


LINEAR_ALGEBRA = {
    "det": torch.linalg.det,
    "torch.det": torch.det,
    "Tensor.det": lambda m: m.det(),
    "logdet": torch.logdet,
    "slogdet": lambda m: torch.linalg.slogdet(m).logabsdet,
    "matrix_exp": torch.linalg.matrix_exp,
    "inv": torch.linalg.inv,
    "inverse": lambda m: m.inverse(),
    "pinv": torch.linalg.pinv,
    "cholesky": torch.linalg.cholesky,
    "cholesky_inverse": lambda m: torch.cholesky_inverse(torch.linalg.cholesky(m)),
    "qr": lambda m: torch.linalg.qr(m).R,
    "svdvals": torch.linalg.svdvals,
    "eigvalsh": torch.linalg.eigvalsh,
    "lu": lambda m: torch.linalg.lu(m).U,
    "lu_factor": lambda m: torch.linalg.lu_factor(m).LU,
    "solve": lambda m: torch.linalg.solve(m, torch.ones(3, 1)),
    "solve_triangular": lambda m: torch.linalg.solve_triangular(m, m[..., :1], upper=True),
}


@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_linear_algebra_without_bf16_kernel_is_computed_in_float32(name):
    torch.manual_seed(0)
    module, rows = Decomposes(LINEAR_ALGEBRA[name]), {"x": torch.randn(4, 9)}
    step = one_step(module, [rows], precision="bf16")
    loss = module(**rows)
    loss.backward()
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=0.03)
    largest = max(float(parameter.grad.abs().max()) for parameter in module.parameters())
    for weight, parameter in module.named_parameters():
        difference = (step.gradients[weight].float() - parameter.grad).abs().max()
        assert float(difference) <= 0.05 * largest, weight
