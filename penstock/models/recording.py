"""Records a model constructor's operations on tensors without executing them.

The constructor runs on fake tensors: shapes and types, no bytes. A `Recorder` notes each operator
that fills, writes or creates a tensor. A tensor in the log is a `Window`, a strided view of a
numbered storage. Views therefore need no operators of their own, and `x.data`, `detach`, ties and
slices all become windows of the same storage.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from penstock.errors import CompileError
from penstock.models.constructor_log import (
    BEFORE_FIRST_DRAW,
    DEFAULT_GENERATOR,
    Constant,
    Draw,
    GeneratorNumber,
    RecordedOperation,
    Window,
)
from penstock.models.replay import Replay, plan

aten = torch.ops.aten

# In-place operators that do not read the values that they replace.
_OVERWRITING = {
    aten.normal_,
    aten.uniform_,
    aten.random_,
    aten.bernoulli_,
    aten.exponential_,
    aten.log_normal_,
    aten.cauchy_,
    aten.geometric_,
    aten.zero_,
    aten.fill_,
    aten.copy_,
}
_FILL_ARGUMENTS = {bool, int, float, torch.Generator}  # besides None; not tensors
# They allocate storage without content; replay allocates storage at its first write.
_ALLOCATING = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.empty_permuted,
    aten.new_empty,
    aten.new_empty_strided,
}
# "In-place" by name, but they move the window and leave the bytes unchanged.
_RESHAPING = {
    aten.set_,
    aten.resize_,
    aten.as_strided_,
    aten.t_,
    aten.transpose_,
    aten.squeeze_,
    aten.unsqueeze_,
    aten.swapaxes_,
    aten.swapdims_,
    aten.detach_,
}


_LEAVES = {
    *(FakeTensor, torch.Tensor, torch.nn.Parameter, torch.Generator, torch.dtype, torch.device),
    *(torch.layout, torch.memory_format, type(None), bool, int, float, str),
}


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Return the arguments of a call as `tree_flatten` does; without containers there is nothing to
    traverse."""
    flat = [*args, *kwargs.values()]
    if all(type(value) in _LEAVES for value in flat):
        return flat, _structure_of_leaves(len(args), tuple(kwargs))
    return tree_flatten((args, kwargs))


@cache
def _structure_of_leaves(positional: int, names: tuple[str, ...]) -> TreeSpec:
    return tree_flatten(((None,) * positional, dict.fromkeys(names)))[1]


class SharedFakeTensorMode(FakeTensorMode):
    """A FakeTensorMode that stays one object when a module created under it is deep-copied.

    `nn.TransformerEncoder` and many others clone their layers with `copy.deepcopy`, which would
    otherwise copy the mode of each fake tensor; different modes must not be mixed.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedFakeTensorMode":
        return self


class Recorder(TorchDispatchMode):
    """Log operators on fake tensors. Use inside `fake_mode`; see `recording()`."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.operations: list[RecordedOperation] = []
        self.generator_states: list[torch.Tensor | None] = [None]  # None: the seed
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept alive, so that no address is reused
        self._generators: list[torch.Generator] = [torch.default_generator]
        self._known_states: list[dict[bytes, int]] = [{}]
        self._accepted_fills: set[tuple[Any, ...]] = set()
        self._mark(DEFAULT_GENERATOR, BEFORE_FIRST_DRAW)

    def storage_bytes(self) -> list[int]:
        """Bytes of each storage, by number."""
        return [storage.nbytes() for storage in self._storages]

    def window(self, tensor: torch.Tensor) -> Window:
        """Return the present window of `tensor`; a new storage gets the next number."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise CompileError(
                f"a constructor made a tensor that is not plain strided memory (layout "
                f"{tensor.layout}, shape {tuple(tensor.shape)}); {_WAY_OUT}"
            )
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
        return Window(
            number,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def record_call(
        self, function: Callable[..., Any], target: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """Log a Python function that fills `target` with random numbers, as a single operation."""
        flat, structure = tree_flatten(((target, *args), kwargs))
        arguments = tuple(self._encode(x) for x in flat)
        window = arguments[0]
        draw = self._draw(_generator_of(flat), flat)
        self.operations.append(
            RecordedOperation(
                function, arguments, structure, (), (window,), self._full(window), (), draw
            )
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet in _ALLOCATING or packet in _RESHAPING or func.namespace == "prim":
            return func(*args, **kwargs)
        if func is aten.detach.default and self._is_without_value(args[0]):
            return fast_detach(self.fake_mode, args[0])  # nn.Parameter calls it
        flat, structure = _flattened(args, kwargs)
        arguments = tuple(self._encode(x) for x in flat)
        writes = tuple(self._written(func, args, kwargs))
        overwrites = self._full(*writes) if packet in _OVERWRITING else ()
        fill = self._fill(func, args, kwargs) if overwrites else None
        known = len(self._storages)
        if fill in self._accepted_fills:
            result = args[0]
        else:
            try:
                result = func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                result = self._run_for_real(func, arguments, structure)
            if fill is not None:
                self._accepted_fills.add(fill)
        creates = tuple(self._created(result, known))
        if not creates and not writes:
            return result
        draw = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            draw = self._draw(_generator_of(flat), flat)
        reads = tuple(x for x in arguments if isinstance(x, Window) and x not in overwrites)
        if overwrites and arguments.count(overwrites[0]) > 1:
            reads += overwrites  # x.copy_(x)
        self.operations.append(
            RecordedOperation(func, arguments, structure, reads, writes, overwrites, creates, draw)
        )
        return result

    def _is_without_value(self, tensor: Any) -> bool:
        is_of_mode = type(tensor) is FakeTensor and tensor.fake_mode is self.fake_mode
        return is_of_mode and tensor.constant is None

    def _fill(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...] | None:
        """Return the operator, type and arguments of a fill of a whole storage; None if every such
        fill must be called.

        The call on a fake tensor has no effect except its errors, so that of equal fills only the
        first is called. A large model has thousands of them.
        """
        values = (*args[1:], *kwargs.values())
        if not args or args[0].constant is not None:  # the call removes the known value
            return None
        if not all(value is None or type(value) in _FILL_ARGUMENTS for value in values):
            return None
        return (func, args[0].dtype, args[1:], tuple(kwargs.items()))

    def _encode(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return self.window(value)
        if isinstance(value, torch.Tensor):
            with _disable_current_modes():
                return Constant(value.detach().clone())
        if isinstance(value, torch.Generator):
            return GeneratorNumber(self._number_of(value))
        return value

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Iterator[Window]:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, FakeTensor):
                    yield self.window(tensor)
                elif isinstance(tensor, torch.Tensor):
                    raise CompileError(
                        f"{_place()}: a constructor writes ({func}) into a tensor that existed "
                        f"before it ran; {_WAY_OUT}"
                    )

    def _created(self, result: Any, known: int) -> Iterator[tuple[int, Window]]:
        flat = [result] if isinstance(result, torch.Tensor) else tree_flatten(result)[0]
        for position, tensor in enumerate(flat):
            if isinstance(tensor, FakeTensor):
                window = self.window(tensor)
                if window.storage >= known:
                    yield position, window

    def _full(self, *windows: Window) -> tuple[Window, ...]:
        return tuple(w for w in windows if w.covers(self._storages[w.storage].nbytes()))

    def _run_for_real(self, func: Any, arguments: tuple[Any, ...], structure: TreeSpec) -> Any:
        """Compute a result that depends on values, which is possible if none of them depends on the
        seed."""
        needed = {x.storage for x in arguments if isinstance(x, Window)}
        steps = plan(self.operations, needed)
        if any(step.operation.draw for step in steps):
            raise CompileError(
                f"{_place()}: the constructor reads the values of random tensors ({func}), so its "
                f"weights cannot be made one at a time; {_WAY_OUT}"
            )
        with _disable_current_modes():
            replay = Replay(self.storage_bytes(), self.generator_states, seed=0)
            for step in steps:
                replay.run(step)
            real = func(*replay.arguments(arguments, structure)[0])

        def to_fake(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return self.fake_mode.from_tensor(value, static_shapes=True)
            return value

        return tree_map(to_fake, real)

    def _number_of(self, generator: torch.Generator) -> int:
        for number, known in enumerate(self._generators):
            if known is generator:
                return number
        self._generators.append(generator)
        self.generator_states.append(generator.get_state())
        self._known_states.append({})
        self._mark(len(self._generators) - 1, BEFORE_FIRST_DRAW)
        return len(self._generators) - 1

    def _draw(self, generator: torch.Generator | None, flat: list[Any]) -> Draw:
        """Record a random draw and how its state arose; the state after each draw is unique."""
        index = DEFAULT_GENERATOR if generator is None else self._number_of(generator)
        states = self._known_states[index]
        number = len(states) - 1
        state = self._generators[index].get_state()
        with _disable_current_modes():
            found = states.get(state.numpy().tobytes())
        restore: int | torch.Tensor | None = state if found is None else found
        if found == number - 1:
            restore = None
        self._mark(index, number)
        return Draw(index, number, restore)

    def _mark(self, index: int, number: int) -> None:
        generator = self._generators[index]
        generator.manual_seed(_MARKER + number)
        with _disable_current_modes():
            self._known_states[index][generator.get_state().numpy().tobytes()] = number

    def restore_generators(self) -> None:
        """Restore the states of the constructor's own generators from before the recording."""
        for generator, state in zip(self._generators, self.generator_states, strict=True):
            if state is not None:
                generator.set_state(state)


_MARKER = 0x5EED_0000_0000_0000
_WAY_OUT = "build the model yourself and pass the nn.Module instead"


def _generator_of(flat: list[Any]) -> torch.Generator | None:
    return next((x for x in flat if isinstance(x, torch.Generator)), None)


def _place() -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    for frame in reversed(traceback.extract_stack()):
        path = frame.filename.replace("\\", "/")
        if "/torch/" not in path and "/penstock/models/" not in path:
            return f"{frame.filename}:{frame.lineno}"
    return "the constructor"


@contextmanager
def recording() -> Iterator[Recorder]:
    """Run the body on fake tensors and log it; the global random state is unchanged afterwards."""
    fake_mode = SharedFakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]):
        recorder = Recorder(fake_mode)
        try:
            with fake_mode, recorder, _rejection_sampling_as_one_operation(recorder):
                yield recorder
        finally:
            recorder.restore_generators()


@contextmanager
def _rejection_sampling_as_one_operation(recorder: Recorder) -> Iterator[None]:
    """`nn.init.trunc_normal_` redraws until every value fits: only replay can run this loop."""
    name = "_no_grad_trunc_normal_"
    original = getattr(torch.nn.init, name, None)
    if original is None:
        yield
        return

    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, *args, **kwargs)
        recorder.record_call(original, tensor, *args, **kwargs)
        return tensor

    setattr(torch.nn.init, name, fill)
    try:
        yield
    finally:
        setattr(torch.nn.init, name, original)
