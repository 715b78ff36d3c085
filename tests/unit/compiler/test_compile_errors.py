"""What cannot be compiled is answered with the module, the line, and what to do."""

import re

import pytest
import torch
from sweeps import compiled
from torch import nn
from torch.nn import functional as F

from penstock.errors import BudgetError, CompileError, ConfigError, NoTrainingError


class Linear(nn.Module):
    """What the modules below share."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Decides(Linear):
    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            return y
        return -y


class DecidesWithin(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Decides()

    def forward(self, x):
        return self.block(x).sum()


class ReadsANumber(Linear):
    def forward(self, x):
        return self.linear(x).sum() * float(x.max())


class ReadsNumpy(Linear):
    def forward(self, x):
        return self.linear(torch.from_numpy(x.numpy() * 2)).sum()


class Selects(Linear):
    def forward(self, x):
        y = self.linear(x)
        return y[y > 0].sum()


class Misshapen(Linear):
    def forward(self, x):
        return self.linear(x.T).sum()


class WritesItsWeight(Linear):
    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.chunk(2)[0].mul_(0.5)
        return self.linear(x).sum()


class RenormalisesItsTable(Linear):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4, max_norm=1.0)

    def forward(self, x):
        return self.linear(self.table(x.long())).sum()


class WritesUnseen(Linear):
    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            y[:, 0].mul_(2)
        return y.sum()


class WritesDetached(Linear):
    def forward(self, x):
        y = self.linear(x)
        y.detach().mul_(2)
        return y.sum()


class ReadsMemory(Linear):
    def forward(self, x):
        return self.linear(x).t().as_strided((2, 2), (1, 2)).sum()


class Normalises(Linear):
    def __init__(self, **options):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, **options)

    def forward(self, x):
        return self.norm(self.linear(x)).square().sum()


class NormalisesByFunction(Normalises):
    def forward(self, x):
        mean, variance = self.norm.running_mean, self.norm.running_var
        return F.batch_norm(self.linear(x), mean, variance, training=True).square().sum()


class NormalisesInstances(Linear):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x):
        return self.norm(self.linear(x)[..., None].expand(-1, -1, 3)).square().sum()


class RemembersThroughAView(Linear):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.split(2)[1].add_(x[0, 2:])
        return (self.linear(x) + self.seen).sum()


class Remembers(Linear):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen.copy_(x[0])
        return (self.linear(x) + self.seen).sum()


class TakesANumber(Linear):
    def forward(self, x):
        return self.linear(x).sum() * x.max().item()


class TakesAList(Linear):
    def forward(self, x):
        return self.linear(x).sum() * sum(x[0].tolist())


class MapsOverRows(Linear):
    def forward(self, x):
        return torch.vmap(lambda row: self.linear(row).sum())(x).sum()


class DrawsNoise(Linear):
    def forward(self, x):
        return self.linear(x + torch.randn_like(x)).sum()


class EntersAutocast(Linear):
    def forward(self, x):
        with torch.autocast("cpu"):
            return self.linear(x).float().sum()


class ReturnsRows(Linear):
    def forward(self, x):
        return self.linear(x)


class InvertsASpectrum(Linear):
    def forward(self, x):
        window = torch.ones(4)
        spectrum = torch.stft(self.linear(x).flatten(), 4, window=window, return_complex=True)
        return torch.istft(spectrum, 4, window=window).sum()


class Factorises(Linear):
    def forward(self, x):
        rows = self.linear(x)
        return torch.linalg.ldl_factor(rows @ rows.T).LD.sum()


class ReturnsTwo(Linear):
    def forward(self, x):
        return self.linear(x).sum(), self.linear(x).mean()


class ReturnsAnInput(Linear):
    def forward(self, x):
        return x.sum()


class HasSpares(Linear):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.spare(x)  # used, and to no effect
        return self.linear(x).sum()


VALUE = (
    "The forward needs the value of a tensor, which no ahead-of-time graph can hold: use "
    "torch.where or masking, or make the decision outside the model."
)
NUMBER = (
    "takes a number out of a tensor (aten.item.default), which no ahead-of-time graph can hold: "
    "compute with the tensor itself, without .item() or .tolist()."
)
BUFFER = (
    "(running statistics of a norm, a cache): an engine keeps no state between steps, so a "
    "replayed step would differ. Use LayerNorm or GroupNorm, or call .eval() on that module alone: "
    "a whole model in eval mode is put in train mode to train."
)
WEIGHT = (
    "only the optimizer changes weights. Write to a copy (.clone()), or remove the option that "
    "renormalises the weight (max_norm)."
)
UNSEEN = (
    "to a tensor that needs a gradient, through a detached view of it or under torch.no_grad(): "
    "autograd does not see that write. Write to a copy (.clone()), or let autograd see it."
)


@pytest.mark.parametrize(
    ("module", "start", "line", "end"),
    [
        (DecidesWithin, "cannot capture block (Decides) at ", "if y.sum() > 0:", VALUE),
        (ReadsANumber, "cannot capture ReadsANumber (", "float(x.max())", VALUE),
        (ReadsNumpy, "cannot capture ReadsNumpy (", "x.numpy() * 2", VALUE),
        (
            Selects,
            "the model at ",
            "return y[y > 0].sum()",
            "makes a tensor whose shape depends on values (aten.index.Tensor), which no "
            "ahead-of-time graph can hold: use torch.where or a mask instead.",
        ),
        (
            Misshapen,
            "cannot capture Misshapen (Misshapen) at ",
            "self.linear(x.T)",
            "Check that the module runs with these inputs: forward(**inputs) in plain PyTorch.",
        ),
        (
            WritesItsWeight,
            "the model at ",
            "self.linear.weight.chunk(2)[0].mul_(0.5)",
            f"writes the weight 'linear.weight' in place (aten.mul_.Tensor): {WEIGHT}",
        ),
        (
            RenormalisesItsTable,
            "table at ",
            "return self.linear(self.table(x.long())).sum()",
            "writes the weight 'table.weight' in place (aten.embedding_renorm_.default): " + WEIGHT,
        ),
        (
            WritesUnseen,
            "the model at ",
            "y[:, 0].mul_(2)",
            f"writes in place (aten.mul_.Tensor) {UNSEEN}",
        ),
        (
            WritesDetached,
            "the model at ",
            "y.detach().mul_(2)",
            f"writes in place (aten.mul_.Tensor) {UNSEEN}",
        ),
        (
            ReadsMemory,
            "the model at ",
            "self.linear(x).t().as_strided((2, 2), (1, 2)).sum()",
            "reads a tensor by as_strided that is itself a view or not contiguous: make it "
            "contiguous (.contiguous().clone()) first, or use slices and permute.",
        ),
        (
            InvertsASpectrum,
            "the model at ",
            "torch.istft(spectrum, 4, window=window)",
            "calls aten.istft.default, which cannot be traced with its derivative: "
            f"aten.equal.default. {VALUE}",
        ),
        (TakesANumber, "the model at ", "x.max().item()", NUMBER),
        (TakesAList, "the model at ", "x[0].tolist()", NUMBER),
        (
            MapsOverRows,
            "the model at ",
            "torch.vmap(lambda row: self.linear(row).sum())(x)",
            "uses a transform of torch.func (torch.vmap, jvp), which Penstock does not compile: "
            "write the operators for the whole batch.",
        ),
        (
            DrawsNoise,
            "the model at ",
            "torch.randn_like(x)",
            "draws random numbers with aten.randn_like.default, which a replayed step could not "
            "repeat; use torch.nn.Dropout, or pass the random values as an input.",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_compile_error_names_source_line_and_remedy(module, start, line, end, capfd):
    with pytest.raises(CompileError) as caught:
        compiled(module(), {"x": torch.randn(3, 4)})
    message = str(caught.value)
    assert message.startswith(start)
    assert message.endswith(end)
    number = re.search(r"test_compile_errors\.py(?:\", line |:)(\d+)", message)
    with open(__file__) as file:
        assert line in file.read().splitlines()[int(number.group(1)) - 1]
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")  # PyTorch's own log would bury the sentence


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (
            Normalises,
            CompileError,
            f"the forward writes its buffer 'norm.running_mean' {BUFFER}",
        ),
        (
            NormalisesByFunction,
            CompileError,
            f"the forward writes its buffer 'norm.running_mean' {BUFFER}",
        ),
        (
            NormalisesInstances,
            CompileError,
            f"the forward writes its buffer 'norm.running_mean' {BUFFER}",
        ),
        (Remembers, CompileError, f"the forward writes its buffer 'seen' {BUFFER}"),
        (RemembersThroughAView, CompileError, f"the forward writes its buffer 'seen' {BUFFER}"),
        (
            EntersAutocast,
            CompileError,
            "the forward enters torch.autocast itself: remove it and set precision: bf16 in the "
            "configuration instead",
        ),
        (
            ReturnsRows,
            CompileError,
            "the model must return a scalar loss; it returns a tensor of shape (3, 4). Reduce it "
            "(mean or sum), or name a loss function in model.loss.",
        ),
        (
            Factorises,
            CompileError,
            "PyTorch has no derivative for an operator of the model: derivative for "
            "aten::linalg_ldl_factor_ex is not implemented. Compute the result from tensors that "
            "need no gradient (.detach()), or write it with other operators.",
        ),
        (
            ReturnsTwo,
            CompileError,
            "the model must return one scalar loss; it returns 2 values",
        ),
        (
            ReturnsAnInput,
            NoTrainingError,
            "the model's result 'sum_1' depends on no weight: nothing can train",
        ),
        (
            HasSpares,
            NoTrainingError,
            "3 weight(s) take no part in the model's result and would never train: scale, "
            "spare.weight, spare.bias. Remove them from the model, or use them in its loss.",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_unsupported_model_code_is_refused_with_exact_message(module, error, message):
    with pytest.raises(error) as caught:
        compiled(module(), {"x": torch.randn(3, 4)})
    assert str(caught.value) == message


def test_batch_norm_without_statistics_is_accepted():
    x = {"x": torch.randn(3, 4)}
    compiled(Normalises(track_running_stats=False), x)
    frozen = Normalises()
    frozen.norm.eval()
    compiled(frozen, x)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("linear.wieght", " (did you mean 'linear.weight'?)"),
        ("encoder.*", ""),
    ],
)
def test_a_freeze_pattern_that_matches_nothing_is_refused(pattern, hint):
    with pytest.raises(ConfigError) as caught:
        compiled(ReturnsAnInput(), {"x": torch.randn(3, 4)}, freeze=(pattern,))
    assert str(caught.value) == (
        f"freeze: pattern {pattern!r} matches no weight{hint}; the model's weights are named like "
        "linear.weight, linear.bias"
    )


def test_weight_larger_than_a_slot_is_named_with_its_bytes():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 32), nn.Linear(32, 4))

        def forward(self, x):
            return self.layers(x).sum()

    with pytest.raises(BudgetError) as caught:
        compiled(Model(), {"x": torch.randn(3, 4)}, slot_bytes=500)
    assert str(caught.value) == (
        "stage layers.1 needs 640 bytes of weights at once and cannot be cut further; a slot holds "
        "500. Raise engine.memory."
    )
