"""The graphs of executables: their nodes, and the shape and type of each node's result.

Names of nodes and of functions' arguments become Python code when an executable is first called,
so only plain identifiers are read.
"""

import keyword
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from penstock.compiler.executables import executable
from penstock.compiler.serialization import arguments, fields
from penstock.compiler.serialization.fields import MalformedError, NotSerializableError
from penstock.compiler.serialization.targets import function_of, name_of
from penstock.compiler.tensors import device_of, standing_for

_PLACEHOLDER, _CALL, _OUTPUT = range(3)
_VAL = "val"  # in the meta of nodes: a tensor without memory like the node's result
_LIST, _TUPLE = "list", "tuple"
_ABSENT = -1
_MOST_NAME = 200


class GraphWriter:
    """Writes graphs; functions and the descriptions of tensors are written once, in tables."""

    def __init__(self) -> None:
        self.targets: dict[str, int] = {}
        self.tensors: dict[tuple[Any, ...], int] = {}
        self._names: dict[Any, int] = {}
        self._storages: dict[int, int] = {}

    def tables(self) -> dict[str, Any]:
        """Return the tables, as JSON; to be written after the graphs."""
        return {"targets": list(self.targets), "tensors": [list(key) for key in self.tensors]}

    def executable(self, module: Any, graph: fx.Graph | None = None) -> list[Any]:
        """Return the graph of an executable as JSON.

        **Arguments:** `graph`, if the caller knows which graph the executable must have.

        Raises:
            NotSerializableError: the executable is more than a graph of operators.
        """
        if not isinstance(module, fx.GraphModule) or (graph is not None and module.graph != graph):
            raise NotSerializableError(f"an executable is a {type(module).__name__}")
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            raise NotSerializableError("an executable has tensors of its own")
        if any(True for _ in module.children()) or type(module.graph._codegen) is not CodeGen:
            raise NotSerializableError("an executable has parts of its own")
        return self.graph(module.graph)

    def graph(self, graph: fx.Graph) -> list[Any]:
        """Return a graph as JSON; errors are those of `executable`."""
        places: dict[fx.Node, int] = {}
        lines = []
        for node in graph.nodes:
            lines.append(self._node(node, places))
            places[node] = len(places)
        return lines

    def _node(self, node: fx.Node, places: dict[fx.Node, int]) -> list[Any]:
        if node.type is not None:
            raise NotSerializableError(f"node {node.name} has the type {node.type}")
        value = self._value(node.meta[_VAL]) if _VAL in node.meta else _ABSENT
        if node.op == "placeholder" and not node.args and not node.kwargs:
            return [_PLACEHOLDER, node.name, node.target, value]
        if node.op == "output" and len(node.args) == 1 and not node.kwargs:
            return [_OUTPUT, node.name, arguments.written(node.args[0], places), value]
        if node.op != "call_function":
            raise NotSerializableError(f"a node of a graph is a {node.op}")
        given = arguments.written(node.args, places)
        options = arguments.written(node.kwargs, places)
        return [_CALL, node.name, self._target(node.target), given, options, value]

    def _target(self, target: Any) -> int:
        if target not in self._names:
            name = name_of(target)
            self._names[target] = self.targets.setdefault(name, len(self.targets))
        return self._names[target]

    def _value(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            kind = _TUPLE if isinstance(value, tuple) else _LIST
            return [kind, *map(self._value, value)]
        raise NotSerializableError(f"the result of a node is {value!r:.80}")

    def _tensor(self, value: torch.Tensor) -> int:
        name = str(value.dtype).removeprefix("torch.")
        if value.layout != torch.strided or name not in fields.DTYPES:
            raise NotSerializableError(f"a tensor has {value.layout} and {value.dtype}")
        device = device_of(value)
        if device.type not in fields.DEVICES:
            raise NotSerializableError(f"a tensor is on device {device}")
        sizes, strides = tuple(value.shape), tuple(value.stride())
        if not all(type(size) is int for size in (*sizes, *strides)):
            raise NotSerializableError(f"a tensor has the shape {sizes}")
        # Costs and memory are counted by which tensors share storage.
        memory = value.untyped_storage()
        number = self._storages.setdefault(memory._cdata, len(self._storages))
        place = (number, value.storage_offset(), memory.nbytes())
        key = (sizes, strides, name, device.type, *place)
        return self.tensors.setdefault(key, len(self.tensors))


class GraphReader:
    """Reads graphs, with the tables that were written with them.

    Raises:
        MalformedError: they are not tables of functions and of tensors.
    """

    def __init__(self, tables: dict[str, Any]) -> None:
        self._targets = [function_of(name) for name in fields.texts(tables["targets"])]
        storages: dict[int, torch.Tensor] = {}
        self._tensors = [_described(line, storages) for line in fields.items(tables["tensors"])]

    def executable(self, lines: Any, name: str) -> fx.GraphModule:
        """Return a module that generates its code when it is first called."""
        return executable(self.graph(lines), name)

    def graph(self, lines: Any) -> fx.Graph:
        """Return the graph of its written form.

        Raises:
            MalformedError: it is not the written form of a graph.
        """
        graph = fx.Graph()
        nodes: list[fx.Node] = []
        place = -1
        for place, line in enumerate(fields.items(lines)):
            code, *rest = fields.items(line) or [None]
            name = _identifier(rest[0] if rest else None)
            if code == _PLACEHOLDER and all(node.op == "placeholder" for node in nodes[-1:]):
                _, target, value = fields.items(rest, 3)
                node = graph.create_node("placeholder", _identifier(target), name=name)
            elif code == _CALL:
                _, target, given, options, value = fields.items(rest, 5)
                node = self._call(graph, name, target, given, options, nodes)
            elif code == _OUTPUT and place == len(lines) - 1:
                _, returned, value = fields.items(rest, 3)
                result = arguments.read(returned, nodes)
                node = graph.create_node("output", "output", (result,), name=name)
            else:
                raise MalformedError(f"expected a node in place {place}, got {line!r:.80}")
            if node.name != name:
                raise MalformedError(f"two nodes have the name {name!r}")
            if value != _ABSENT:
                node.meta[_VAL] = self._value(value)
            nodes.append(node)
        if not nodes or nodes[-1].op != "output":
            raise MalformedError("a graph returns nothing")
        return graph

    def _call(
        self, graph: fx.Graph, name: str, target: Any, given: Any, options: Any, nodes: Any
    ) -> fx.Node:
        number = fields.number(target)
        if number >= len(self._targets):
            raise MalformedError(f"node {name} calls function {number} of {len(self._targets)}")
        args, kwargs = arguments.read(given, nodes), arguments.read(options, nodes)
        if type(args) is not tuple or type(kwargs) is not dict:
            raise MalformedError(f"node {name} has no arguments")
        if not all(key.isidentifier() and not keyword.iskeyword(key) for key in kwargs):
            raise MalformedError(f"node {name} has the options {list(kwargs)!r:.200}")
        return graph.create_node("call_function", self._targets[number], args, kwargs, name)

    def _value(self, value: Any) -> Any:
        if value is None:
            return None
        if type(value) is list:
            kind, *content = value or [None]
            if kind not in (_LIST, _TUPLE):
                raise MalformedError(f"expected the result of a node, got {value!r:.80}")
            found = [self._value(item) for item in content]
            return tuple(found) if kind == _TUPLE else found
        number = fields.number(value)
        if number >= len(self._tensors):
            raise MalformedError(f"expected one of {len(self._tensors)} tensors, got {number}")
        return self._tensors[number]


def _identifier(value: Any) -> str:
    """Return a name that may become part of Python code."""
    name = fields.text(value)
    if len(name) > _MOST_NAME or not name.isidentifier() or keyword.iskeyword(name):
        raise MalformedError(f"expected the name of a node, got {name!r:.80}")
    return name


def _described(line: Any, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a tensor without memory, on the meta device; `storages` are those so far."""
    sizes, strides, dtype, device, *place = fields.items(line, 7)
    shape, steps = fields.shape(sizes), fields.numbers(strides)
    number, offset, size = fields.numbers(place)
    if len(steps) != len(shape):
        raise MalformedError(f"a tensor has {len(shape)} sizes and {len(steps)} strides")
    if number not in storages:
        storages[number] = torch.empty(size, dtype=torch.uint8, device="meta")
    try:
        made = storages[number].view(fields.dtype(dtype)).as_strided(shape, steps, offset)
    except RuntimeError as error:
        raise MalformedError(f"a tensor lies outside of its storage: {error}") from None
    return standing_for(made, torch.device(fields.device(device)))
