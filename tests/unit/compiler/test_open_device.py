"""A kind that was traced on one GPU runs on any GPU of the host: no node names one."""

import torch
from torch import fx

from penstock.compiler.joint_tracing import leave_device_open

aten = torch.ops.aten


def test_nodes_name_the_kind_of_device_and_no_number():
    graph = fx.Graph()
    x = graph.placeholder("x")
    gpu, host = torch.device("cuda", 3), torch.device("cpu")
    made = graph.call_function(aten.full.default, ([2, 3], 1.0), {"device": gpu})
    moved = graph.call_function(aten._to_copy.default, (x,), {"device": host})
    odd = graph.call_function(torch.zeros, ([2], {"device": [gpu]}))
    graph.output((made, moved, odd))
    leave_device_open(graph)
    assert made.kwargs == {"device": torch.device("cuda")}
    assert made.kwargs["device"].index is None
    assert made.args == ([2, 3], 1.0)
    assert moved.kwargs == {"device": host}
    assert moved.args == (x,)
    assert odd.args == ([2], {"device": [torch.device("cuda")]})
    graph.lint()
