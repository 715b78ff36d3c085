"""A graph as text without the names of nodes: equal texts compute the same function."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx


def lines_of(graph: fx.Graph) -> list[str]:
    """Return one line per node: its operator and its arguments; nodes are represented by their
    indices."""
    return lines_of_nodes(graph.nodes, {}, lambda node: (node.args, node.kwargs))


def lines_of_nodes(
    nodes: Iterable[fx.Node], given: Mapping[fx.Node, str], arguments: Callable[[fx.Node], Any]
) -> list[str]:
    """Return one line per node of a part of a graph.

    **Arguments:** `given` has the text of each node before the part that the part reads;
    `arguments` returns the arguments of a node that its line contains.
    """
    texts = {node: _Reference(text) for node, text in given.items()}
    lines = []
    for number, node in enumerate(nodes):
        args = fx.node.map_arg(arguments(node), texts.__getitem__)
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args!r}")
        texts[node] = _Reference(f"%{number}")
    return lines


def digest_of(lines: Iterable[str]) -> str:
    """Return a hash of lines of text, 16 hexadecimal digits."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


class _Reference(str):
    """The text of a node among arguments, printed bare."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
