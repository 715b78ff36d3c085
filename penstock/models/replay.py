"""Runs a recorded constructor on real memory, one tensor at a time.

`plan` traverses the log backwards and keeps the operations that the wanted storages depend on. A
random fill whose result is never read (modules are often initialised twice) must still draw its
numbers, because later draws depend on the state. Such a fill runs on scratch memory that is freed
at once. Other unused operations are dropped. `Replay` then runs forwards and frees every storage
after its last use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from penstock.errors import CompileError
from penstock.models.constructor_log import (
    BEFORE_FIRST_DRAW,
    DEFAULT_GENERATOR,
    Constant,
    GeneratorNumber,
    RecordedOperation,
    Window,
)


@dataclass(frozen=True)
class PlannedOperation:
    """An operation, and whether only its random draw is needed (`scratch`), not its result.

    `finished` are the storages that no later operation uses. `remember` says that a later draw
    restores the state after this operation.
    """

    operation: RecordedOperation
    scratch: bool
    finished: tuple[int, ...] = ()
    remember: bool = False


def plan(operations: Sequence[RecordedOperation], wanted: Iterable[int]) -> list[PlannedOperation]:
    """Return the operations that the `wanted` storages depend on, in order."""
    live = set(wanted)
    drawn_later: set[int] = set()
    states_needed: set[tuple[int, int]] = set()
    chosen: list[PlannedOperation] = []
    for operation in reversed(operations):
        draw = operation.draw
        changed = {window.storage for window in operation.writes}
        changed.update(window.storage for _, window in operation.creates)
        if not changed & live:
            if draw is None or draw.generator not in drawn_later:
                continue
            scratch = len(operation.overwrites) == len(operation.writes)
        else:
            scratch = False
        if not scratch:
            live.difference_update(window.storage for window in operation.overwrites)
            live.difference_update(window.storage for _, window in operation.creates)
        live.update(window.storage for window in operation.reads)
        remember = False
        if draw is not None:
            drawn_later.add(draw.generator)
            remember = (draw.generator, draw.number) in states_needed
            if isinstance(draw.restore, int):
                states_needed.add((draw.generator, draw.restore))
        chosen.append(PlannedOperation(operation, scratch, (), remember))
    # `chosen` runs backwards, so the first mention of a storage is its last use.
    seen: set[int] = set()
    for position, step in enumerate(chosen):
        used = [window.storage for window in step.operation.reads]
        if not step.scratch:
            used += [window.storage for window in step.operation.writes]
            used += [window.storage for _, window in step.operation.creates]
        finished = tuple(dict.fromkeys(number for number in used if number not in seen))
        seen.update(finished)
        chosen[position] = replace(step, finished=finished)
    chosen.reverse()
    return chosen


class Replay:
    """The storages and random states of one replay. Draws as after `torch.manual_seed(seed)`."""

    def __init__(
        self,
        storage_bytes: Sequence[int],
        generator_states: Sequence[torch.Tensor | None],
        seed: int,
    ) -> None:
        self._bytes = storage_bytes
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._generators: list[torch.Generator] = []
        self._remembered: dict[tuple[int, int], torch.Tensor] = {}
        for index, state in enumerate(generator_states):
            generator = torch.Generator().manual_seed(seed)
            if state is not None:
                generator.set_state(state)
            self._generators.append(generator)
            self._remembered[index, BEFORE_FIRST_DRAW] = generator.get_state()

    def tensor(self, window: Window, *, overwritten: bool = False) -> torch.Tensor:
        """The real tensor of a window. Memory that was never written is zero."""
        storage = self._storages.get(window.storage)
        if storage is None:
            storage = torch.UntypedStorage(self._bytes[window.storage])
            if not overwritten:
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
            self._storages[window.storage] = storage
        empty = torch.empty(0, dtype=window.dtype)
        return empty.set_(storage, window.offset, window.size, window.stride)

    def release(self, storage: int) -> None:
        """Drop a storage; its memory is freed with the last tensor that uses it."""
        self._storages.pop(storage, None)

    def arguments(
        self, arguments: Sequence[Any], structure: TreeSpec, step: PlannedOperation | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return real (args, kwargs) for logged arguments."""
        overwrites = step.operation.overwrites if step else ()

        def decode(value: Any) -> Any:
            if isinstance(value, Window):
                if step and step.scratch and value in overwrites:
                    return torch.empty_strided(value.size, value.stride, dtype=value.dtype)
                return self.tensor(value, overwritten=value in overwrites)
            if isinstance(value, Constant):
                return value.value.clone()
            if isinstance(value, GeneratorNumber):
                return self._generators[value.index]
            return value

        return tree_unflatten([decode(value) for value in arguments], structure)

    def run(self, step: PlannedOperation) -> None:
        """Run one operation. The global random state is unchanged afterwards."""
        operation, draw = step.operation, step.operation.draw
        args, kwargs = self.arguments(operation.arguments, operation.structure, step)
        with torch.no_grad():
            if draw is None:
                result = operation.function(*args, **kwargs)
            else:
                result = self._draw(step, args, kwargs)
        if operation.creates and not step.scratch:
            flat = [result] if isinstance(result, torch.Tensor) else tree_flatten(result)[0]
            for position, window in operation.creates:
                self._keep(operation, flat[position], window)

    def _draw(self, step: PlannedOperation, args: Any, kwargs: Any) -> Any:
        draw = step.operation.draw
        assert draw is not None
        generator = self._generators[draw.generator]
        if isinstance(draw.restore, torch.Tensor):
            generator.set_state(draw.restore)
        elif draw.restore is not None:
            generator.set_state(self._remembered[draw.generator, draw.restore])
        if draw.generator != DEFAULT_GENERATOR:
            result = step.operation.function(*args, **kwargs)
        else:
            # The global generator takes this state for one call, since some random operators accept
            # no generator argument.
            default_state = torch.default_generator.get_state()
            torch.default_generator.set_state(generator.get_state())
            try:
                result = step.operation.function(*args, **kwargs)
                generator.set_state(torch.default_generator.get_state())
            finally:
                torch.default_generator.set_state(default_state)
        if step.remember:
            self._remembered[draw.generator, draw.number] = generator.get_state()
        return result

    def _keep(self, operation: RecordedOperation, tensor: torch.Tensor, window: Window) -> None:
        layout = tuple(tensor.stride()), tensor.storage_offset()
        actual = (tensor.dtype, tuple(tensor.shape), *layout)
        if actual != (window.dtype, window.size, window.stride, window.offset):
            raise CompileError(
                f"{operation.function}: expected {window}, as recorded, got {actual}; build the "
                "model yourself and pass the nn.Module instead"
            )
        self._storages[window.storage] = tensor.untyped_storage()
