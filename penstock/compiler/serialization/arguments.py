"""Arguments of operators as JSON: plain values as they are, everything else as a list with a code.

An argument of a node in a graph refers to other nodes, by their places. Other callers have other
objects that are referred to by place (`models/written_recipe.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from penstock.compiler.serialization import fields
from penstock.compiler.serialization.fields import MalformedError, NotSerializableError

_NODE, _LIST, _TUPLE, _DICT, _DTYPE, _DEVICE, _LAYOUT, _MEMORY_FORMAT, _COMPLEX = range(9)
_PLAIN = (type(None), bool, int, float, str)
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
_LAYOUT_NAMES = {layout: name for name, layout in _LAYOUTS.items()}
_MEMORY_FORMAT_NAMES = {memory_format: name for name, memory_format in _MEMORY_FORMATS.items()}
_MOST_TEXT = 64


def written(
    value: Any, places: Mapping[Any, int], referred: type | tuple[type, ...] = fx.Node
) -> Any:
    """Return an argument as JSON; `places` are the indices of the nodes before.

    **Arguments:** `referred` are the types of the keys of `places`.

    Raises:
        NotSerializableError: the argument is an object of another type.
    """
    if type(value) in _PLAIN:
        if type(value) is str and len(value) > _MOST_TEXT:
            raise NotSerializableError(f"an argument is a text of {len(value)} characters")
        return value
    if isinstance(value, complex):
        return [_COMPLEX, value.real, value.imag]
    if isinstance(value, referred):
        return [_NODE, places[value]]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return [_TUPLE, *(written(item, places, referred) for item in value)]
    if isinstance(value, list):
        return [_LIST, *(written(item, places, referred) for item in value)]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return [_DICT, *([key, written(item, places, referred)] for key, item in value.items())]
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
        if name in fields.DTYPES:
            return [_DTYPE, name]
    elif isinstance(value, torch.device):
        if value.index is None and value.type in fields.DEVICES:
            return [_DEVICE, value.type]
    elif isinstance(value, torch.layout) and value in _LAYOUT_NAMES:
        return [_LAYOUT, _LAYOUT_NAMES[value]]
    elif isinstance(value, torch.memory_format) and value in _MEMORY_FORMAT_NAMES:
        return [_MEMORY_FORMAT, _MEMORY_FORMAT_NAMES[value]]
    raise NotSerializableError(f"an argument is {value!r:.200}")


def read(value: Any, nodes: Sequence[Any]) -> Any:
    """Return the argument of its written form; `nodes` are the nodes before.

    Raises:
        MalformedError: it is not the written form of an argument.
    """
    if type(value) is not list:
        if type(value) not in _PLAIN or (type(value) is str and len(value) > _MOST_TEXT):
            raise MalformedError(f"expected an argument, got {value!r:.80}")
        return value
    code, *content = value or [None]
    if type(code) is not int:
        raise MalformedError(f"expected the code of an argument, got {code!r:.80}")
    if code == _NODE:
        (place,) = fields.numbers(fields.items(content, 1))
        if place >= len(nodes):
            raise MalformedError(f"node {len(nodes)} reads node {place}")
        return nodes[place]
    if code == _LIST:
        return [read(item, nodes) for item in content]
    if code == _TUPLE:
        return tuple(read(item, nodes) for item in content)
    if code == _DICT:
        pairs = [fields.items(item, 2) for item in content]
        return {fields.text(key): read(item, nodes) for key, item in pairs}
    if code == _COMPLEX:
        real, imaginary = map(fields.decimal, fields.items(content, 2))
        return complex(real, imaginary)
    (name,) = fields.texts(fields.items(content, 1))
    if code == _DTYPE:
        return fields.dtype(name)
    if code == _DEVICE:
        return torch.device(fields.device(name))
    if code == _LAYOUT and name in _LAYOUTS:
        return _LAYOUTS[name]
    if code == _MEMORY_FORMAT and name in _MEMORY_FORMATS:
        return _MEMORY_FORMATS[name]
    raise MalformedError(f"expected an argument, got {value!r:.80}")
