"""A hash that identifies a captured graph, independent of the names of its nodes."""

import hashlib
import re

import torch
from torch._subclasses.fake_tensor import FakeTensor

from penstock.compiler.capture import Capture
from penstock.compiler.digests import lines_of
from penstock.compiler.regions import records_gradients

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in a printed function; varies by process


def graph_digest(captured: Capture, weight_prefix: str = "") -> str:
    """Return a hash of a captured graph and of the meaning of its placeholders.

    Weights and buffers contribute name, shape and type; tensors created from literals contribute
    their values. The hash depends on the sizes of the inputs and on the version of PyTorch.
    """
    stands_for = {
        **{n: f"weight {t.removeprefix(weight_prefix)}" for n, t in captured.weights.items()},
        **{n: f"buffer {t.removeprefix(weight_prefix)}" for n, t in captured.buffers.items()},
        **{n: f"input {t}" for n, t in captured.inputs.items()},
        **{n: f"constant {_digest_of(t)}" for n, t in captured.constants.items()},
    }
    digest = hashlib.blake2b(digest_size=16)
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            kind = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
            digest.update(f"{stands_for.get(node.name)} {kind}\n".encode())
    for node, line in zip(captured.graph.nodes, lines_of(captured.graph), strict=True):
        # Before the graph is rewritten, the node's meta contains whether autograd is on.
        mode = "" if records_gradients(node) else " without gradients"
        digest.update(f"{_ADDRESS.sub('', line)}{mode}\n".encode())
    return digest.hexdigest()


def _digest_of(tensor: torch.Tensor) -> str:
    if isinstance(tensor, FakeTensor):
        return f"{tuple(tensor.shape)} {tensor.dtype}"
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.blake2b(values.tobytes()).hexdigest()}"
