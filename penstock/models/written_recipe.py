"""The recipe of a model's weights as bytes, without pickle.

What is read is checked completely: only registered operators and one function of `torch.nn.init`
are called, and every window lies within its storage.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from penstock.compiler.serialization import (
    MalformedError,
    NotSerializableError,
    arguments,
    fields,
    operator_name,
    operator_of,
    read_constants,
    write_constants,
)
from penstock.models.constructor_log import (
    DEFAULT_GENERATOR,
    Constant,
    Draw,
    RecordedOperation,
    Window,
)
from penstock.models.weight_recipe import WeightRecipe

_KEYS = ("storages", "leaves", "tensors", "functions", "operations", "constants")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(torch.nn.init, name)
    for name in ("_no_grad_trunc_normal_",)
    if hasattr(torch.nn.init, name)
}
"""The functions that the recorder logs as one operation (`recording.py`), by name."""
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_Leaf = Window | Constant
_LEAVES = (Window, Constant)


def write_recipe(recipe: WeightRecipe) -> bytes:
    """Return the written form of a recipe.

    Raises:
        NotSerializableError: the constructor used generators of its own, or set their states; or an
            operation has something that has no written form.
    """
    data = _written(recipe)
    try:
        again = _written(read_recipe(data))
    except MalformedError as error:
        raise NotSerializableError(f"the written form cannot be read: {error}") from error
    if again != data:
        raise NotSerializableError("the written form reads as another recipe")
    return data


def read_recipe(data: bytes | memoryview) -> WeightRecipe:
    """Return the recipe of its written form.

    Raises:
        MalformedError: the bytes are not the written form of a recipe.
    """
    content, values = fields.unframed(data)
    try:
        return _recipe(fields.mapping(content, _KEYS), values)
    except MalformedError:
        raise
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise MalformedError(f"{type(error).__name__}: {error}") from error


class _Leaves:
    """Windows and constants in a table, each once."""

    def __init__(self) -> None:
        self.places: dict[_Leaf, int] = {}
        self.constants: dict[str, torch.Tensor] = {}

    def place(self, leaf: Any) -> int:
        """Return the place of a window or a constant."""
        if not isinstance(leaf, _Leaf):
            raise NotSerializableError(f"an argument is {leaf!r:.200}")
        return self.places.setdefault(leaf, len(self.places))

    def written(self) -> list[Any]:
        """Return the table as JSON; a constant is the name of its value."""
        return [self._leaf(leaf) for leaf in self.places]

    def _leaf(self, leaf: _Leaf) -> Any:
        if isinstance(leaf, Constant):
            name = str(len(self.constants))
            self.constants[name] = leaf.value.contiguous()
            return name
        dtype = str(leaf.dtype).removeprefix("torch.")
        if dtype not in fields.DTYPES:
            raise NotSerializableError(f"a tensor has the type {dtype}")
        return [leaf.storage, dtype, list(leaf.size), list(leaf.stride), leaf.offset]


def _written(recipe: WeightRecipe) -> bytes:
    if any(state is not None for state in recipe.generator_states):
        raise NotSerializableError("the constructor has random generators of its own")
    leaves, functions = _Leaves(), dict[str, int]()
    operations = [_write_operation(each, leaves, functions) for each in recipe.operations]
    tensors = [[name, leaves.place(window)] for name, window in recipe.windows.items()]
    table = leaves.written()
    constants, values = write_constants(leaves.constants)
    content = {
        "storages": list(recipe.storage_bytes),
        "leaves": table,
        "tensors": tensors,
        "functions": list(functions),
        "operations": operations,
        "constants": constants,
    }
    return fields.framed(content, *values)


def _write_operation(
    operation: RecordedOperation, leaves: _Leaves, functions: dict[str, int]
) -> list[Any]:
    function = operation.function
    if isinstance(function, torch._ops.OpOverload):
        name = operator_name(function)
    elif function in _NAMES:
        name = _NAMES[function]
    else:
        raise NotSerializableError(f"the constructor calls {function}")
    for leaf in operation.arguments:
        if isinstance(leaf, _Leaf):
            leaves.place(leaf)
    args, kwargs = tree_unflatten(list(operation.arguments), operation.structure)
    return [
        functions.setdefault(name, len(functions)),
        arguments.written(args, leaves.places, _LEAVES),
        arguments.written(kwargs, leaves.places, _LEAVES),
        *(
            [leaves.place(window) for window in windows]
            for windows in (operation.reads, operation.writes, operation.overwrites)
        ),
        [[position, leaves.place(window)] for position, window in operation.creates],
        None if operation.draw is None else _write_draw(operation.draw),
    ]


def _write_draw(draw: Draw) -> list[Any]:
    if draw.generator != DEFAULT_GENERATOR or isinstance(draw.restore, torch.Tensor):
        raise NotSerializableError("the constructor sets the state of a random generator")
    return [draw.number, draw.restore]


def _recipe(have: Mapping[str, Any], data: memoryview) -> WeightRecipe:
    storages = fields.numbers(have["storages"])
    constants = read_constants(have["constants"], data)
    leaves = [_read_leaf(line, storages, constants) for line in fields.items(have["leaves"])]
    functions = [_function(fields.text(name)) for name in fields.items(have["functions"])]
    tensors = [fields.items(line, 2) for line in fields.items(have["tensors"])]
    lines = fields.items(have["operations"])
    return WeightRecipe(
        windows={fields.text(name): _window(place, leaves) for name, place in tensors},
        operations=[_read_operation(line, functions, leaves) for line in lines],
        storage_bytes=storages,
        generator_states=[None],
    )


def _read_leaf(
    line: Any, storages: tuple[int, ...], constants: Mapping[str, torch.Tensor]
) -> _Leaf:
    if isinstance(line, str):
        if line not in constants:
            raise MalformedError(f"there is no constant {line!r:.80}")
        return Constant(constants[line])
    storage, dtype, size, stride, offset = fields.items(line, 5)
    window = Window(
        fields.number(storage),
        fields.dtype(dtype),
        fields.shape(size),
        fields.numbers(stride),
        fields.number(offset),
    )
    if window.storage >= len(storages) or len(window.size) != len(window.stride):
        raise MalformedError(f"expected a window of one of {len(storages)} storages, got {line}")
    last = window.offset + sum((n - 1) * s for n, s in zip(window.size, window.stride, strict=True))
    end = (last + 1) * window.dtype.itemsize
    if 0 not in window.size and end > storages[window.storage]:
        raise MalformedError(f"a window ends at byte {end} of {storages[window.storage]}")
    return window


def _window(place: Any, leaves: list[_Leaf]) -> Window:
    (leaf,) = _leaves([place], leaves)
    if not isinstance(leaf, Window):
        raise MalformedError(f"expected a window, got a {type(leaf).__name__}")
    return leaf


def _leaves(places: Any, leaves: list[_Leaf]) -> Iterator[_Leaf]:
    for place in fields.numbers(places):
        if place >= len(leaves):
            raise MalformedError(f"expected one of {len(leaves)} tensors, got {place}")
        yield leaves[place]


def _windows(places: Any, leaves: list[_Leaf]) -> tuple[Window, ...]:
    return tuple(_window(place, leaves) for place in fields.items(places))


def _read_operation(
    line: Any, functions: list[Callable[..., Any]], leaves: list[_Leaf]
) -> RecordedOperation:
    function, args, kwargs, reads, writes, overwrites, creates, draw = fields.items(line, 8)
    number = fields.number(function)
    if number >= len(functions):
        raise MalformedError(f"expected one of {len(functions)} functions, got {number}")
    given = arguments.read(args, leaves), arguments.read(kwargs, leaves)
    if type(given[0]) is not tuple or type(given[1]) is not dict:
        raise MalformedError("an operation has no arguments")
    flat, structure = tree_flatten(given)
    pairs = [fields.items(pair, 2) for pair in fields.items(creates)]
    return RecordedOperation(
        function=functions[number],
        arguments=tuple(flat),
        structure=structure,
        reads=_windows(reads, leaves),
        writes=_windows(writes, leaves),
        overwrites=_windows(overwrites, leaves),
        creates=tuple((fields.number(at), _window(place, leaves)) for at, place in pairs),
        draw=None if draw is None else _read_draw(draw),
    )


def _read_draw(line: Any) -> Draw:
    number, restore = fields.items(line, 2)
    if restore is not None and type(restore) is not int:
        raise MalformedError(f"expected the number of a draw, got {restore!r:.80}")
    return Draw(DEFAULT_GENERATOR, fields.number(number), restore)


def _function(name: str) -> Callable[..., Any]:
    return _FUNCTIONS[name] if name in _FUNCTIONS else operator_of(name)
