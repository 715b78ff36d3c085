"""A graph as text without the names of nodes: equal texts compute the same function."""

import hashlib
from collections.abc import Iterable

from torch import fx


def lines_of(graph: fx.Graph) -> list[str]:
    """Return one line per node: its operator and its arguments; nodes are represented by their
    indices."""
    place: dict[fx.Node, str] = {}
    lines = []
    for number, node in enumerate(graph.nodes):
        place[node] = f"%{number}"
        args = fx.node.map_arg((node.args, node.kwargs), lambda n: _Reference(place[n]))
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args!r}")
    return lines


def digest_of(lines: Iterable[str]) -> str:
    """Return a hash of lines of text, 16 hexadecimal digits."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


class _Reference(str):
    """The index of a node within its graph, printed bare."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
