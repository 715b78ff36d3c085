"""Comparison of programs: everything that an engine, a planner or a test reads of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import fx

from penstock.compiler import operator_costs
from penstock.compiler.tensors import device_of
from penstock.program import Kind, Program


def assert_same_program(found: Program, expected: Program) -> None:
    """Compare two programs in every field, their graphs node by node."""
    for field in fields(Program):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "stages":
            _assert_same_stages(ours, theirs)
        elif field.name == "constants":
            assert list(ours) == list(theirs)
            for name in ours:
                _assert_same_tensor(ours[name], theirs[name])
        elif field.name == "prelude":
            assert (ours is None) == (theirs is None)
            if ours is not None:
                _assert_same_graph(ours.graph, theirs.graph)
        else:
            assert ours == theirs, field.name
            assert list(ours) == list(theirs), field.name


def _assert_same_stages(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    kinds: dict[int, Kind] = {}
    for ours, theirs in zip(found, expected, strict=True):
        assert kinds.setdefault(id(theirs.kind), ours.kind) is ours.kind
        for name in ("index", "name", "weights", "inputs", "outputs", "first_dropout"):
            assert getattr(ours, name) == getattr(theirs, name), name
    for stage in expected:
        _assert_same_kind(kinds[id(stage.kind)], stage.kind)


def _assert_same_kind(found: Kind, expected: Kind) -> None:
    for field in fields(Kind):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "graphs":
            assert list(ours) == list(theirs)
            for name in ours:
                _assert_same_graph(ours[name], theirs[name])
        elif isinstance(theirs, fx.GraphModule):
            assert ours.graph is found.graphs[field.name]
            # Costs follow from the tensors that share storage.
            assert operator_costs(ours.graph) == operator_costs(theirs.graph)
            assert type(ours).__name__ == type(theirs).__name__
            assert ours.code == theirs.code
        else:
            assert ours == theirs, field.name


def _assert_same_graph(found: fx.Graph, expected: fx.Graph) -> None:
    places: dict[fx.Node, fx.Node] = {}
    assert len(found.nodes) == len(expected.nodes)
    for ours, theirs in zip(found.nodes, expected.nodes, strict=True):
        assert (ours.op, ours.name, ours.type) == (theirs.op, theirs.name, theirs.type)
        assert ours.target is theirs.target or ours.target == theirs.target
        args, kwargs = fx.node.map_arg((theirs.args, theirs.kwargs), places.__getitem__)
        _assert_same_argument(ours.args, args)
        _assert_same_argument(ours.kwargs, kwargs)
        assert ("val" in ours.meta) == ("val" in theirs.meta), ours
        _assert_same_value(ours.meta.get("val"), theirs.meta.get("val"))
        places[theirs] = ours


def _assert_same_argument(found: Any, expected: Any) -> None:
    """Compare arguments with their types: 1, 1.0 and True are different arguments."""
    if isinstance(expected, (list, tuple)):
        assert isinstance(found, tuple) == isinstance(expected, tuple)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            _assert_same_argument(ours, theirs)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_same_argument(found[key], expected[key])
    else:
        assert type(found) is type(expected)
        assert found is expected or found == expected or (found != found and expected != expected)


def _assert_same_value(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert device_of(found) == device_of(expected)
        for name in ("shape", "dtype"):
            assert getattr(found, name) == getattr(expected, name), name
        assert found.stride() == expected.stride()
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        for ours, theirs in zip(found, expected, strict=True):
            _assert_same_value(ours, theirs)
    else:
        assert found is expected is None


def _assert_same_tensor(found: torch.Tensor, expected: torch.Tensor) -> None:
    _assert_same_value(found, expected)
    assert type(found) is type(expected)
    if type(expected) is torch.Tensor:
        as_bytes = [t.reshape(-1).view(torch.uint8) for t in (found, expected)]
        assert torch.equal(*as_bytes)
