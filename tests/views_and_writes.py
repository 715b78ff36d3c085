"""Views of a tensor, by every operator that makes one, and writes in place, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

WIDTH = 8
ROWS = 4  # of one micro-batch

Tensor = torch.Tensor

# Views of a [ROWS, WIDTH] tensor, by name; what is written through them must reach the tensor.
SINGLE_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda t: t[:, 2:6],
    "strided slice": lambda t: t[:, ::2],
    "rows": lambda t: t[1:3],
    "select": lambda t: t[1],
    "column": lambda t: t[:, 3],
    "ellipsis": lambda t: t[...],
    "new axis": lambda t: t[None],
    "narrow": lambda t: t.narrow(1, 1, 5),
    "view": lambda t: t.view(-1)[3:20],
    "reshape": lambda t: t.reshape(ROWS, 2, WIDTH // 2)[:, 1],
    "flatten": lambda t: t.flatten()[::3],
    "ravel": lambda t: t.ravel()[1:],
    "unflatten": lambda t: t.unflatten(1, (2, -1))[:, 0],
    "t": lambda t: t.t()[2:5],
    "T": lambda t: t.T[1],
    "mT": lambda t: t.mT[0],
    "transpose": lambda t: t.transpose(0, 1)[4:],
    "swapaxes": lambda t: t.swapaxes(0, 1)[:2],
    "movedim": lambda t: t.movedim(0, 1)[::2],
    "permute": lambda t: t.view(ROWS, 2, WIDTH // 2).permute(2, 0, 1)[1],
    "squeeze": lambda t: t.unsqueeze(1).squeeze(1)[:, :3],
    "unsqueeze": lambda t: t.unsqueeze(-1)[1],
    "diagonal": lambda t: t.diagonal(),
    "as_strided": lambda t: t.as_strided((2, 3), (WIDTH, 1), 2),
    "unfold": lambda t: t.unfold(1, 2, 2)[:, :, 0],
    "view_as": lambda t: t.view_as(t)[:, 1:],
    "expand_as": lambda t: t.expand_as(t)[:, 5:],
    "einsum": lambda t: torch.einsum("ij->ji", t)[3],
    "atleast_3d": lambda t: torch.atleast_3d(t)[0],
    "broadcast_tensors": lambda t: torch.broadcast_tensors(t, torch.ones(ROWS, 1))[0][2],
    "contiguous": lambda t: t.contiguous()[:, 4],
    "to": lambda t: t.to(torch.float32)[0],
}
MULTIPLE_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda t: t.chunk(2, -1)[1],
    "split": lambda t: t.split([3, 5], -1)[0],
    "split by size": lambda t: t.split(4, 1)[1],
    "unbind": lambda t: t.unbind(0)[2],
    "unpacked": lambda t: next(iter(t)),
    "tensor_split": lambda t: t.tensor_split(3, 1)[1],
    "hsplit": lambda t: torch.hsplit(t, 2)[0],
    "vsplit": lambda t: torch.vsplit(t, 2)[1],
}
DETACHED_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda t: t.detach()[:, :4],
    "data": lambda t: t.data[1],
}


def _assign(view: Tensor, value: Tensor) -> None:
    view[...] = value


def _index(view: Tensor, value: Tensor) -> None:
    view[[0]] = value  # advanced indexing: no view, but a write


def _masked(view: Tensor, value: Tensor) -> None:
    view.masked_fill_(torch.arange(view.shape[-1]) % 2 == 0, 0.25)


# Writes of a view with a value [] that may need a gradient.
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "mul_": lambda v, g: v.mul_(1.5),
    "mul_ by value": lambda v, g: v.mul_(g),
    "add_": lambda v, g: v.add_(g, alpha=0.5),
    "sub_": lambda v, g: v.sub_(0.1),
    "iadd": lambda v, g: v.__iadd__(g),
    "div_": lambda v, g: v.div_(2.0),
    "neg_": lambda v, g: v.neg_(),
    "tanh_": lambda v, g: v.tanh_(),
    "sigmoid_": lambda v, g: v.sigmoid_(),
    "elu_": lambda v, g: F.elu_(v),
    "silu inplace": lambda v, g: F.silu(v, inplace=True),
    "fill_": lambda v, g: v.fill_(0.3),
    "zero_": lambda v, g: v.zero_(),
    "copy_": lambda v, g: v.copy_(g.expand_as(v)),
    "lerp_": lambda v, g: v.lerp_(torch.ones_like(v), 0.3),
    "addcmul_": lambda v, g: v.addcmul_(torch.ones_like(v), g.expand_as(v)),
    "assign": _assign,
    "index_put_": _index,
    "masked_fill_": _masked,
    "index_add_": lambda v, g: v.index_add_(0, torch.tensor([0]), g.expand_as(v[:1])),
    "cumsum_": lambda v, g: v.cumsum_(-1),
    "out": lambda v, g: torch.add(torch.ones_like(v), 0.5, out=v),
}


# Their backward reads what they wrote, so a second write would make it fail in PyTorch.
KEEP_THEIR_RESULT = {"tanh_", "sigmoid_", "elu_"}
