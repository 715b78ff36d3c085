"""Writes in place reach every view, and gradients are those of PyTorch."""

import pytest
import torch
from sweeps import one_step
from torch import nn
from views_and_writes import MULTIPLE_VIEWS, ROWS, SINGLE_VIEWS, WIDTH

from penstock.errors import CompileError
from penstock.models import InputSpec, ModelSource
from penstock.planning.builders import compile_source


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(WIDTH, WIDTH)


class WritesAView(Layer):
    """Writes a view of what needs a gradient or not, and reads the whole."""

    def __init__(self, view, base):
        super().__init__()
        self.view, self.base = view, base

    def forward(self, x):
        y = torch.tanh(self.linear(x.clone()))
        base = {"input": lambda: x, "zeros": lambda: torch.zeros(ROWS, WIDTH)}.get(
            self.base, y.clone
        )()
        early = base[:, 1:3]
        self.view(base).mul_(3).add_(1)
        return (base * y).sum() + (early * y[:, :2]).sum()


class FillsWithoutGradients(Layer):
    def forward(self, x):
        filled = torch.zeros(ROWS, WIDTH)
        with torch.no_grad():
            filled[:, :4] = self.linear(x)[:, 4:]
            with torch.enable_grad():
                scale = self.linear(x).mean()
            filled.mul_(2)
        return (filled * self.linear(x) * scale).sum()


class FillsWithGradients(Layer):
    def forward(self, x):
        filled = torch.zeros(WIDTH, ROWS).t()  # strides of its own
        filled.copy_(self.linear(x))
        filled[1, :2] = 5.0
        return filled.square().sum()


class CutsOff(Layer):
    def forward(self, x):
        gate = self.linear(x)
        gate.detach_()
        shift = torch.ones(WIDTH)
        shift.add_(gate[0])
        return (self.linear(x) * gate * shift).sum()


class ReadsComplexWithoutGradients(Layer):
    """Reads a complex number that needs a gradient under `no_grad`; `writes` elsewhere or not."""

    def __init__(self, writes):
        super().__init__()
        self.writes = writes

    def forward(self, x):
        y = self.linear(x)
        turned = torch.view_as_complex(y.unflatten(1, (-1, 2)))
        scale = torch.ones(WIDTH)
        if self.writes:
            scale[0] = 2.0
        with torch.no_grad():
            length = turned.abs().repeat_interleave(2, 1)
        return (y * length * scale).sum()


class KeepsATable(Layer):
    """Has a tensor that is a plain attribute."""

    def __init__(self):
        super().__init__()
        self.table = torch.rand(WIDTH)

    def forward(self, x):
        return (self.linear(x) * self.table).square().sum()


def assert_as_plain(module, x):
    step = one_step(module, [{"x": x.clone()}])
    loss = module(x.clone())
    loss.backward()
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in module.named_parameters():
        scale = float(parameter.grad.abs().max())
        worst = float((step.gradients[name] - parameter.grad).abs().max())
        assert worst <= 1e-5 * scale, name


@pytest.mark.parametrize(
    ("view", "base"),
    [
        *((name, "input") for name in MULTIPLE_VIEWS),  # autograd refuses to write these otherwise
        *((name, "zeros") for name in ("chunk", "ravel", "unflatten")),
        *((name, "hidden") for name in ("slice", "diagonal", "unfold", "permute")),
    ],
)
def test_a_write_to_a_view_reaches_its_tensor(view, base):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    assert_as_plain(WritesAView({**SINGLE_VIEWS, **MULTIPLE_VIEWS}[view], base), x)


@pytest.mark.parametrize("view", ["einsum", "atleast_3d", "broadcast_tensors"])
def test_write_to_an_unsupported_view_is_refused(view):
    with pytest.raises(CompileError) as caught:
        one_step(WritesAView(SINGLE_VIEWS[view], "zeros"), [{"x": torch.ones(ROWS, WIDTH)}])
    assert str(caught.value).endswith(
        "later (aten.mul_.Tensor), and the write cannot be followed through that view: copy one of "
        "the two (.clone())."
    )


@pytest.mark.parametrize("module", [FillsWithoutGradients, FillsWithGradients, CutsOff])
def test_gradients_flow_past_writes_as_in_pytorch(module):
    assert_as_plain(module(), torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("writes", [False, True])
def test_complex_numbers_read_without_gradients_get_none(writes):
    assert_as_plain(ReadsComplexWithoutGradients(writes), torch.randn(ROWS, WIDTH))


def test_doubled_chunk_of_the_input_has_double_gradient():
    """The published form of the defect: 0.521 came out for 0.372."""

    class Model(Layer):
        def forward(self, x):
            first, _ = x.chunk(2, -1)
            first.mul_(2)
            return self.linear(x).square().mean()

    assert_as_plain(Model(), torch.randn(ROWS, WIDTH))


def compiled_from_source(module):
    source = ModelSource.from_module(module, inputs={"x": InputSpec((WIDTH,))})
    return compile_source(source, micro_batch=ROWS, length=1, precision="fp32")


def test_a_tensor_attribute_has_its_value_in_the_program():
    module = KeepsATable()
    constants = compiled_from_source(module).constants
    assert any(torch.equal(value, module.table) for value in constants.values())


def test_read_of_weight_data_is_refused():
    class ReadsData(Layer):
        def forward(self, x):
            return (self.linear(x) * self.linear.weight.data.mean()).sum()

    with pytest.raises(CompileError) as caught:
        compiled_from_source(ReadsData())
    assert str(caught.value).endswith(
        "reads a tensor that the module does not register and the forward does not create, such "
        "as weight.data or a tensor in a list: the program would use one value for ever. Use "
        ".detach() instead of .data; keep weights in nn.ParameterList, layers in nn.ModuleList and "
        "constants in register_buffer instead of a list or mapping."
    )


def test_tensor_attribute_written_in_forward_is_refused():
    class Counts(KeepsATable):
        def forward(self, x):
            self.table.add_(1)
            return super().forward(x)

    with pytest.raises(CompileError) as caught:
        compiled_from_source(Counts())
    assert str(caught.value).endswith(
        "it writes a tensor that is neither its input nor made in the forward. An engine keeps no "
        "state between steps: write to a copy (.clone())."
    )


class WritesByStrides(Layer):
    """Writes elements that no slice names; those beside them keep their gradient."""

    def __init__(self, write):
        super().__init__()
        self.write = write

    def forward(self, x):
        y = self.linear(x).clone()
        self.write(y)
        return y.tanh().sum()


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.fill_diagonal_(0.3),
        lambda y: y.as_strided((2, 3), (WIDTH, 1), 2).mul_(2.0),
    ],
)
def test_elements_beside_a_strided_write_keep_their_gradient(write):
    assert_as_plain(WritesByStrides(write), torch.randn(ROWS, WIDTH))
