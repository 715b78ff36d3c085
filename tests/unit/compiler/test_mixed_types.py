"""In bf16, float32 inputs and buffers meet bfloat16 weights: the operators accept both."""

import pytest
import torch
from sweeps import one_step
from torch import nn
from torch.nn import functional as F

from penstock.errors import CompileError


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


IN_FLOAT32 = {
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
    "matrix_power": lambda m: torch.matrix_power(m, -2),
    "matrix_norm": lambda m: torch.linalg.matrix_norm(m, "nuc"),
    "norm of a matrix": lambda m: torch.linalg.norm(m[0], 2),
    "nuclear norm": lambda m: torch.norm(m[0], "nuc"),
    "cdist": lambda m: torch.cdist(m, m.flip(0)),
    "cdist p=1": lambda m: torch.cdist(m, m.flip(0), p=1),
    "pdist": lambda m: F.pdist(m.flatten(1)),
    "quantile": lambda m: torch.quantile(m, 0.3, dim=-1),
    "rfft": lambda m: torch.fft.rfft(m).abs(),
    "irfft2": lambda m: torch.fft.irfft2(torch.fft.rfft2(m), s=(3, 3)),
    "stft": lambda m: torch.stft(
        m.flatten(), 8, window=torch.hann_window(8), return_complex=True
    ).abs(),
    "polar": lambda m: torch.polar(m, m).real,
    "view_as_complex": lambda m: torch.view_as_complex(m[..., :2].contiguous()).abs(),
    "avg_pool3d": lambda m: F.avg_pool3d(m[None, None], 2),
    "local_response_norm": lambda m: F.local_response_norm(m, 2),
    "antialias": lambda m: F.interpolate(m[None], size=2, mode="bilinear", antialias=True),
    "multi_margin_loss": lambda m: F.multi_margin_loss(m[:, 0], torch.tensor([0, 1, 2, 1])),
    "multilabel_margin_loss": lambda m: F.multilabel_margin_loss(
        m[:, 0], torch.tensor([[1, -1, 0]] * 4)
    ),
    "i1": torch.special.i1,
    "erfcx": torch.special.erfcx,
    "ndtri": lambda m: torch.special.ndtri(torch.sigmoid(m)),
}


def assert_near_float32(module: nn.Module, rows: dict[str, torch.Tensor]) -> None:
    """Compare a bf16 step with PyTorch in float32, within the precision of bfloat16."""
    step = one_step(module, [rows], precision="bf16")
    loss = module(**rows)
    loss.backward()
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=0.03)
    largest = max(float(parameter.grad.abs().max()) for parameter in module.parameters())
    for weight, parameter in module.named_parameters():
        difference = (step.gradients[weight].float() - parameter.grad).abs().max()
        assert float(difference) <= 0.05 * largest, weight


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_function_without_bf16_kernel_is_computed_in_float32(name):
    torch.manual_seed(0)
    module, rows = Decomposes(IN_FLOAT32[name]), {"x": torch.randn(4, 9)}
    assert_near_float32(module, rows)


def assigned(into, rows, values):
    into[rows] = values
    return into


ONE_TYPE = {
    "mv": lambda h, x: h.mv(x[0]),
    "dot": lambda h, x: torch.dot(h[0], x[0]),
    "inner": lambda h, x: torch.inner(x, h),
    "tensordot": lambda h, x: torch.tensordot(h, x, dims=([1], [1])),
    "vecdot": lambda h, x: torch.linalg.vecdot(x, h),
    "multi_dot": lambda h, x: torch.linalg.multi_dot([h, x.T, h]),
    "addmv": lambda h, x: torch.addmv(x[:, 0], h, x[1]),
    "addbmm": lambda h, x: torch.addbmm(x[:, :4], h[None], x.T[None]),
    "conv_transpose3d": lambda h, x: F.conv_transpose3d(
        x.view(1, 4, 9, 1, 1), h.view(4, 1, 9, 1, 1)
    ),
    "prelu": lambda h, x: F.prelu(x, h[0]),
    "lerp": lambda h, x: torch.lerp(h, x, 0.3),
    "cross": lambda h, x: torch.linalg.cross(h[:, :3], x[:, :3]),
    "embedding_bag": lambda h, x: F.embedding_bag(
        torch.tensor([[0, 3]]), h, per_sample_weights=x[:1, :2], mode="sum"
    ),
    "index_add": lambda h, x: x.index_add(0, torch.tensor([1, 1]), h[:2]),
    "index_add_": lambda h, x: torch.zeros(4, 9).index_add_(0, torch.tensor([1, 1]), h[:2]),
    "index_add_ in bfloat16": lambda h, x: (h * 1).index_add_(0, torch.tensor([1, 1]), x[:2]),
    "scatter_add_": lambda h, x: torch.zeros(4, 9).scatter_add_(
        1, torch.tensor([[0, 0, 5]] * 4), h[:, :3]
    ),
    "masked_scatter": lambda h, x: x.masked_scatter(x > 0, h),
    "setitem": lambda h, x: assigned(torch.zeros(4, 9), torch.tensor([2, 0]), h[:2]),
    "setitem in bfloat16": lambda h, x: assigned(h * 1, torch.tensor([2, 0]), x[:2]),
    "addmm_": lambda h, x: torch.ones(4, 4).addmm_(h, h.T),
    "lstm_cell": lambda h, x: torch.lstm_cell(x, (h, x), h.repeat(9, 1), h.repeat(9, 1))[0],
    "gru_cell": lambda h, x: torch.gru_cell(x, h, h.repeat(7, 1)[:27], h.repeat(7, 1)[:27]),
}


class Mixes(nn.Module):
    """A function of bfloat16 hidden rows [4, 9] and float32 rows [4, 9]."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(9, 9), function

    def forward(self, x):
        return self.function(self.layer(x), x).square().mean()


@pytest.mark.parametrize("name", ONE_TYPE)
def test_function_of_bf16_and_float32_operands_is_computed(name):
    torch.manual_seed(0)
    module, rows = Mixes(ONE_TYPE[name]), {"x": torch.randn(4, 9)}
    assert_near_float32(module, rows)


def test_operator_without_bf16_kernel_is_named_with_its_stage_and_a_remedy():
    module = Mixes(lambda h, x: torch.ops.aten._cdist_forward(h, h, 2.0, None))
    with pytest.raises(CompileError) as caught:
        one_step(module, [{"x": torch.randn(4, 9)}], precision="bf16")
    assert str(caught.value) == (
        """stage model cannot run on cpu: "cdist" not implemented for 'BFloat16'. Compute that """
        "operator in float32 (.float() on its arguments), or set precision: fp32."
    )
