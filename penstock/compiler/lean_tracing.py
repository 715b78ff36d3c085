"""Makes an export cheaper, without any influence on its graph.

For every node, the exporter symbolises the whole Python stack and describes the result a second
time. Both are a large part of an export's time. A program needs one line of the stack: the
innermost of a module's forward, which error messages name.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import fx
from torch.fx.experimental import proxy_tensor


@contextmanager
def lean_tracing() -> Iterator[None]:
    """Context in which exported nodes get a short stack trace and no second description.

    Each node's `stack_trace` contains the line that `source_line` (`nodes.py`) shows, and nothing
    else. Nodes have no `tensor_meta`, whose content is in `val` too.
    """
    tracer: Any = proxy_tensor._ModuleStackTracer
    create_node = tracer.create_node

    def create_node_with_line(self: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node: fx.Node = create_node(self, *args, **kwargs)
        if node.op not in ("placeholder", "output") and not node.stack_trace:
            node.stack_trace = innermost_forward(sys._getframe(1))
        return node

    module: Any = proxy_tensor
    describe = module._extract_tensor_metadata
    # Tracers set their attribute `record_stack_traces` when they are made.
    module.PythonKeyTracer.record_stack_traces = property(lambda _: False, lambda *_: None)
    tracer.create_node = create_node_with_line
    module._extract_tensor_metadata = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        tracer.create_node = create_node
        module._extract_tensor_metadata = describe
        del module.PythonKeyTracer.record_stack_traces


def innermost_forward(frame: FrameType | None) -> str | None:
    """Return the line of the innermost `forward` outside of PyTorch, as a traceback prints it."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and "/torch/" not in code.co_filename.replace("\\", "/"):
            return f'File "{code.co_filename}", line {frame.f_lineno}, in forward'
        frame = frame.f_back
    return None
