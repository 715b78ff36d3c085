"""A forward is captured once: one that computes something else the next time is refused."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from penstock.compiler import CompileOptions, compile_module
from penstock.errors import CompileError


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count, self.counts, self.kept = 0, [0], None
        self.register_buffer("number", torch.zeros(()))
        self.own_random = random.Random(0)

    def scale(self, h):
        raise NotImplementedError

    def forward(self, x):
        h = self.linear(x)
        return (h * self.scale(h)).sum()


class CountsInAnAttribute(Layered):
    def scale(self, h):
        self.count += 1
        return min(1.0, self.count / 100)


class CountsInAList(Layered):
    def scale(self, h):
        self.counts[0] += 1
        return min(1.0, self.counts[0] / 100)


class Remembers(Layered):
    def scale(self, h):
        before, self.kept = self.kept, h.detach().mean()
        return 1.0 if before is None else before


class AssignsABuffer(Layered):
    def scale(self, h):
        self.number = self.number + 1
        return self.number


class DrawsInPython(Layered):
    def scale(self, h):
        return random.random()


class DrawsInNumPy(Layered):
    def scale(self, h):
        return float(np.random.uniform())


class DrawsOfItsOwn(Layered):
    def scale(self, h):
        return self.own_random.random()


class ReplacesAModule(Layered):
    def scale(self, h):
        self.linear = nn.Linear(4, 4)
        return h


class AddsAModule(Layered):
    def scale(self, h):
        self.more = nn.Linear(4, 4)
        return h


class KeepsWhatNobodyReads(Layered):
    def scale(self, h):
        self.count += 1
        self.kept = h.pow(2).mean()
        return self.kept


def compiled(model):
    return compile_module(model, {"x": torch.ones(2, 4)}, CompileOptions())


@pytest.mark.parametrize(
    ("kind", "name"),
    [(CountsInAnAttribute, "count"), (CountsInAList, "counts"), (Remembers, "kept")],
)
def test_state_of_a_forward_is_refused_by_name(kind, name):
    with pytest.raises(CompileError) as caught:
        compiled(kind())
    assert str(caught.value) == (
        f"the forward changes {name} and computes something else in the next call: an engine keeps "
        "no state between steps. Make values that change with the steps an input of the model, or "
        "remove them."
    )


def test_an_assigned_buffer_is_refused_by_name():
    with pytest.raises(CompileError, match="the forward writes its buffer 'number'"):
        compiled(AssignsABuffer())


@pytest.mark.parametrize(("kind", "path"), [(ReplacesAModule, "linear"), (AddsAModule, "more")])
def test_a_module_that_a_forward_replaces_is_refused_by_name(kind, path):
    with pytest.raises(CompileError) as caught:
        compiled(kind())
    assert str(caught.value) == (
        f"the forward replaces {path} (Linear) by another module, or adds or removes it: a program "
        "has the modules that the model has before. Choose the module in the model's "
        "configuration, or when the model is built."
    )


@pytest.mark.parametrize("kind", [DrawsInPython, DrawsInNumPy, DrawsOfItsOwn])
def test_unrepeatable_random_numbers_are_refused(kind):
    with pytest.raises(CompileError, match="draws random numbers with Python's random or with"):
        compiled(kind())


def test_attribute_not_read_by_later_forwards_may_be_written():
    model = KeepsWhatNobodyReads()
    assert compiled(model).stages
    assert (model.count, model.kept) == (0, None)
