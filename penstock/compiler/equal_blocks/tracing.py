"""Finds the blocks of a model while it is exported."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor

from penstock.compiler.equal_blocks.comparison import Comparison, forget_escaped
from penstock.compiler.equal_blocks.recording import Recording
from penstock.compiler.equal_blocks.records import EqualBlock, FirstBlock, NotEqual, tensors_in
from penstock.compiler.equal_blocks.runs import Run

_FEWEST_BLOCKS = 3  # the second one is still computed, so that two would gain nothing


class BlockTracing:
    """The equal blocks of one capture.

    `equal` are the blocks that were not traced. `differing` are the kinds of which two blocks
    differ.

    Args:
        module: the model.
        unshared: how many blocks of a kind are traced as usual before its first block; a kind that
            is not in it has none.
    """

    def __init__(self, module: nn.Module, unshared: Mapping[Any, int]) -> None:
        self._kinds = _kinds_of(module)
        self._unshared = dict(unshared)
        self._seen: Counter[Any] = Counter()
        self._records: dict[Any, FirstBlock | None] = {}
        self._run: Run | None = None
        self._reused: dict[int, Tensor] = {}  # by id, which is theirs while they are kept
        self.equal: list[EqualBlock] = []
        self.differing: set[Any] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context of an export whose equal blocks are compared instead of traced."""
        tracer: Any = proxy_tensor._ModuleStackTracer
        module: Any = proxy_tensor
        call_module, proxy_call = tracer.call_module, module.proxy_call

        def call_block(self: Any, owner: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            return call_module(self, owner, blocks._forward_of(self, owner, forward), args, kwargs)

        def call_operator(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
            run = blocks._run
            if run is None:
                blocks._refuse_reused(args, kwargs)
                return proxy_call(mode, func, pre_dispatch, args, kwargs)

            def trace() -> Any:
                blocks._run = None  # the inside of an operator is not part of the block
                try:
                    return proxy_call(mode, func, pre_dispatch, args, kwargs)
                finally:
                    blocks._run = run

            return run.call(mode, func, args, kwargs, trace)

        blocks = self
        tracer.call_module, module.proxy_call = call_block, call_operator
        try:
            yield
        finally:
            tracer.call_module, module.proxy_call = call_module, proxy_call
            self._run = None

    def unshared_next(self) -> dict[Any, int]:
        """Return how many blocks of each kind are not to be compared in the next attempt.

        The second block of a kind may differ from the first only because its input requires a
        gradient. The record then begins with the second block. After any other failure, the kind is
        traced as usual; if no kind is known to differ, every kind is.
        """
        unshared = dict(self._unshared)
        for kind in self.differing or set(self._kinds.values()):
            second = kind in self.differing and self._seen[kind] == 2
            unshared[kind] = 1 if second and kind not in unshared else sys.maxsize
        return unshared

    def require_equal(self) -> None:
        """Raise `NotEqual` if a block differed, even if the model's code caught that error."""
        if self.differing:
            raise NotEqual

    def _forward_of(self, tracer: Any, owner: nn.Module, forward: Any) -> Any:
        """Return the forward of a module, which may be that of a block."""
        kind = self._kinds.get(id(owner))
        if kind is None or self._run is not None or tracer.enable_attr_proxy:
            return forward
        self._seen[kind] += 1
        if self._seen[kind] <= self._unshared.get(kind, 0):
            return forward
        if kind not in self._records:
            return lambda *args, **kwargs: self._record(kind, tracer, forward, args, kwargs)
        record = self._records[kind]
        if record is None:
            return forward
        return lambda *args, **kwargs: self._compare(kind, record, tracer, forward, args, kwargs)

    def _record(self, kind: Any, tracer: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        first = FirstBlock(len(self._records), _is_autocast_enabled())
        recording = self._run = Recording(first, tracer)
        self._records[kind] = None
        try:
            outputs = forward(*args, **kwargs)
        finally:
            self._run = None
        if recording.is_usable():
            self._records[kind] = first
        return outputs

    def _compare(
        self, kind: Any, first: FirstBlock, tracer: Any, forward: Any, args: Any, kwargs: Any
    ) -> Any:
        if first.autocast != _is_autocast_enabled():
            return forward(*args, **kwargs)
        comparison = self._run = Comparison(first, tracer)
        try:
            outputs = forward(*args, **kwargs)
            self._run = None
            outputs, numbers = comparison.finish(outputs, len(self.equal))
        except Exception:
            self.differing.add(kind)
            raise
        finally:
            self._run = None
        self.equal.append(EqualBlock(first, numbers))
        self._reused.update((id(t), t) for t in first.results if t is not None)
        del comparison
        with torch._C.DisableTorchFunction():
            forget_escaped(first)
        return outputs

    def _refuse_reused(self, args: Any, kwargs: Any) -> None:
        """Refuse results that left their block in another way than being returned."""
        if self._reused and any(id(t) in self._reused for t in tensors_in((args, kwargs))):
            self.differing.update(self._records)
            raise NotEqual


def _kinds_of(module: nn.Module) -> dict[int, Any]:
    """Return the kinds of the modules that may be equal blocks, by the modules' ids.

    Blocks of a kind have one parent, one class, weights and buffers of the same shapes, and equal
    flags and texts as attributes. Numbers are left out: many blocks know their own index.
    """
    kinds: dict[int, Any] = {}
    for path, parent in module.named_modules():
        groups: dict[Any, list[nn.Module]] = defaultdict(list)
        for child in parent.children():
            groups[type(child)].append(child)
        for children in groups.values():
            if len(children) < _FEWEST_BLOCKS:
                continue
            alike: dict[Any, list[nn.Module]] = defaultdict(list)
            for child in children:
                alike[path, _description(child)].append(child)
            for kind, members in alike.items():
                if len(members) >= _FEWEST_BLOCKS:
                    kinds.update((id(member), kind) for member in members)
    return kinds


def _description(block: nn.Module) -> tuple[Any, ...]:
    parts: list[Any] = []
    for path, owner in block.named_modules():
        attributes = tuple(
            (name, value) for name, value in vars(owner).items() if type(value) in (bool, str)
        )
        tensors = tuple(
            (name, tuple(value.shape), value.dtype, value.requires_grad)
            for held in (owner._parameters, owner._buffers)
            for name, value in held.items()
            if value is not None
        )
        parts.append((path, type(owner), attributes, tensors))
    return tuple(parts)


def _is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
