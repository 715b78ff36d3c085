"""Graphs as functions: PyTorch writes a graph as Python code, in which every literal must be exact.

PyTorch writes a literal by its `repr`. That of a complex number is no literal: Python reads
`(-0+1j)` as an addition, which loses the sign of a zero, and `nanj` as a name.
"""

from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


class _ComplexLiteral(complex):
    """A complex number whose `repr`, read as Python code, is the same number in every bit.

    The code of a graph knows the names `nan` and `inf`.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"complex({self.real!r}, {self.imag!r})"


def executable(graph: fx.Graph, name: str) -> fx.GraphModule:
    """Return a module that runs `graph`; it generates its code when it is first called."""
    for node in graph.nodes:
        if _has_complex((node.args, node.kwargs)):
            node.args = fx.node.map_aggregate(node.args, _exact)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _exact)
    return _LazyGraphModule(nn.Module(), graph, class_name=name.replace(".", "_"))


def _has_complex(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_complex, value))
    if isinstance(value, dict):
        return any(map(_has_complex, value.values()))
    return isinstance(value, complex)


def _exact(value: Any) -> Any:
    return _ComplexLiteral(value) if isinstance(value, complex) else value
