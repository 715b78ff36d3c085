"""Tensors that share memory with a weight are one parameter, neighbours, or refused."""

import pytest
import torch
from torch import nn

from penstock.errors import CompileError
from penstock.models import InputSpec, ModelSource
from penstock.models.deferred import record

WEIGHTS = (
    "the weights 'a.weight' and 'b.weight' share memory without being one parameter, so an "
    "optimizer would update this memory twice. To tie them, assign the parameter itself (b.weight "
    "= a.weight, without .data); otherwise give one of them a copy (.clone())."
)
STALE = (
    "'table' shares memory with the weight 'a.weight', and would keep its first values while the "
    "weight trains. Compute it in forward, or register a copy (.clone())."
)
BOTH = (
    "the buffer 'table' is the weight 'a.weight' itself, and a tensor is either trained or "
    "constant. To use the weight, assign it as an attribute without register_buffer; for a "
    "constant, register a copy (.detach().clone())."
)


class Pair(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        change(self)

    def forward(self, x):
        return self.b(self.a(x)).sum()


def built(change):
    ModelSource.from_module(Pair(change), inputs={"x": InputSpec((4,))})


def deferred(change):
    record(lambda: Pair(change))


def weight(view):
    return lambda pair: setattr(pair.b, "weight", nn.Parameter(view(pair.a.weight.data)))


def halves_of_one_memory(pair):
    both = torch.rand(4, 8)
    pair.a.weight, pair.b.weight = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])


def one_flat_memory(pair):
    nn.utils.vector_to_parameters(torch.rand(40), pair.parameters())


@pytest.mark.parametrize("make", [built, deferred])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (weight(lambda w: w), WEIGHTS),
        (weight(lambda w: w.t()), WEIGHTS),
        (weight(lambda w: w[1:3]), WEIGHTS),
        (weight(lambda w: w[:, ::2]), WEIGHTS),
        (lambda pair: pair.register_buffer("table", pair.a.weight.data[0]), STALE),
        (lambda pair: pair.register_buffer("table", pair.a.weight), BOTH),
        (lambda pair: setattr(pair, "table", pair.a.weight.detach()), STALE),
        (lambda pair: setattr(pair, "table", [pair.a.weight.detach()[0]]), STALE),
    ],
    ids=["same", "transposed", "rows", "columns", "buffer", "weight", "attribute", "list"],
)
def test_memory_shared_with_a_weight_is_refused(make, change, message):
    with pytest.raises(CompileError) as caught:
        make(change)
    assert str(caught.value) == message


@pytest.mark.parametrize("make", [built, deferred])
@pytest.mark.parametrize(
    "change",
    [
        lambda pair: setattr(pair.b, "weight", pair.a.weight),
        lambda pair: setattr(pair, "flat", [pair.a.weight, pair.b.weight]),
        lambda pair: setattr(pair, "rnn", nn.LSTM(4, 4)),
        halves_of_one_memory,
        one_flat_memory,
    ],
    ids=["tied", "listed", "lstm", "interleaved", "flat"],
)
def test_tied_weights_and_disjoint_views_of_one_storage_are_accepted(make, change):
    make(change)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(4).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(4).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8), "quantized"),
    ],
)
@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_other_kinds_are_refused(make, kind, is_registered):
    def change(pair):
        if is_registered:
            pair.register_buffer("table", make())
        else:
            pair.table = [make()]

    with pytest.raises(CompileError, match=f"^'table' is a tensor of another kind .{kind}. than "):
        built(change)


@pytest.mark.filterwarnings("ignore")
def test_lazy_module_without_weights_is_refused():
    with pytest.raises(CompileError, match=r"^'b\.weight' has no shape yet: call the module once"):
        built(lambda pair: setattr(pair, "b", nn.LazyLinear(4)))
