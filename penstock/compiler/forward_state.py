"""Rejects a forward whose next call computes something else, since a forward is captured only once.

A counter that a forward increments, data kept from the last batch, and numbers drawn by Python or
NumPy would be constants of the program. Attributes that a forward writes and no later forward reads
(an auxiliary loss for the caller) are allowed. If attributes have changed, the forward is captured
again with the modules in their new state, and both graphs are compared.
"""

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.compiler.capture import Capture, Precision, capture, refused_buffer_write
from penstock.compiler.graph_digest import graph_digest
from penstock.errors import CompileError, few

# Attributes of every module that contain its parts, not state of a forward.
_PARTS = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_Leaves = dict[tuple[Any, ...], Any]


def capture_repeatable(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    precision: Precision,
    training: bool,
) -> Capture:
    """Export `module(**inputs)` as `capture` does, if every forward computes the same.

    **Raises:** `CompileError` for code that cannot be captured, or naming the state that differs.
    """
    watch = _Watch(module)
    with watch, warnings.catch_warnings():
        # A warning of PyTorch: the code below finds out whether such an attribute matters.
        warnings.filterwarnings("ignore", "The tensor attribute.* assigned during export")
        captured = capture(module, inputs, precision, training)
    if watch.changed:
        with watch.as_left(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attribute.* assigned during export")
            try:
                again = graph_digest(capture(module, inputs, precision, training))
            except CompileError:  # it reads a tensor of an earlier forward
                again = None
        if again != graph_digest(captured):
            raise CompileError(
                f"the forward changes {few(watch.changed)} and computes something else in the next "
                "call: an engine keeps no state between steps. Make values that change with the "
                "steps an input of the model, or remove them."
            )
    return captured


def _refused_numbers() -> CompileError:
    return CompileError(
        "the forward draws random numbers with Python's random or with numpy.random: a program "
        "would repeat the first numbers for ever. Use torch.nn.Dropout, or give them as an input "
        "of the model."
    )


def _random_states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()
    return (random.getstate(), name, np.asarray(keys).tobytes(), *rest)


class _Watch:
    """Compares the modules' attributes before and after a forward.

    `changed` are the names of the attributes that differ, as `path.attribute`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules: dict[str, nn.Module] = {}
        self._before: dict[str, dict[str, Any]] = {}
        self._after: dict[str, dict[str, Any]] = {}
        self._leaves: _Leaves = {}
        self._held: list[tuple[str, nn.Module, dict[str, Any]]] = []
        self.changed: list[str] = []

    def __enter__(self) -> None:
        self._handles = [
            self._module.register_forward_pre_hook(self._begin),
            self._module.register_forward_hook(self._end),
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, *_: object) -> None:
        self._drawn = _random_states()
        self._modules = dict(self._module.named_modules())
        self._before = _attributes(self._module)
        self._leaves = dict(_leaves(self._before))
        self._held = [
            (path, owner, dict(held))
            for path, owner in self._module.named_modules()
            for held in (owner._parameters, owner._buffers)
        ]

    def _end(self, *_: object) -> None:
        modules = dict(self._module.named_modules())
        for path, owner in (modules | self._modules).items():
            if modules.get(path) is not self._modules.get(path):
                raise CompileError(
                    f"the forward replaces {path} ({type(owner).__name__}) by another module, or "
                    "adds or removes it: a program has the modules that the model has before. "
                    "Choose the module in the model's configuration, or when the model is built."
                )
        for path, owner, held in self._held:
            for name, tensor in held.items():
                if getattr(owner, name, None) is not tensor:
                    raise refused_buffer_write(f"{path}.{name}" if path else name)
        self._after = _attributes(self._module)
        leaves = dict(_leaves(self._after))
        for place in {**self._leaves, **leaves}:
            if not _same(self._leaves.get(place, _Watch), leaves.get(place, _Watch)):
                name = ".".join(filter(None, place[:2]))
                self.changed += [name] if name not in self.changed else []
        drew = [p for p, v in leaves.items() if isinstance(v, _Drawn) and v != self._leaves.get(p)]
        if drew or _random_states() != self._drawn:
            raise _refused_numbers()

    @contextmanager
    def as_left(self) -> Iterator[None]:
        """Give the modules the attributes that the forward left."""
        try:
            self._put(self._after)
            yield
        finally:
            self._put(self._before)

    def _put(self, attributes: Mapping[str, Mapping[str, Any]]) -> None:
        for path, owner in self._module.named_modules():
            for name in _attributes_of(owner).keys() - attributes[path].keys():
                del owner.__dict__[name]
            owner.__dict__.update(attributes[path])


class _Drawn(str):
    """The state of a random number generator."""


def _attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {path: _attributes_of(owner) for path, owner in module.named_modules()}


def _attributes_of(owner: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if name not in _PARTS}


def _leaves(attributes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the contents of attributes, with their position: path, attribute, and keys within
    it."""
    seen: set[int] = set()
    stack: list[tuple[tuple[Any, ...], Any]] = [
        ((path, name), value) for path, own in attributes.items() for name, value in own.items()
    ]
    while stack:
        place, value = stack.pop()
        if isinstance(value, random.Random):
            yield place, _Drawn(value.getstate())
        elif isinstance(value, np.random.Generator):
            yield place, _Drawn(value.bit_generator.state)
        elif isinstance(value, (*_PLAIN, torch.Tensor, nn.Module, type)) or callable(value):
            yield place, value
        elif id(value) not in seen:
            seen.add(id(value))
            yield (*place, type(value).__name__), None
            stack += [((*place, key), item) for key, item in _items(value)]


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return [(repr(key), item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, (set, frozenset)):
        return [(repr(item), None) for item in value]
    return list(getattr(value, "__dict__", {}).items())


def _same(one: Any, other: Any) -> bool:
    return one is other or (
        type(one) is type(other) and type(one) in (*_PLAIN, _Drawn) and one == other
    )
