"""Custom autograd functions of every style, and nets that call one in each of three blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class RoundThrough(Function):
    """Rounds; the gradient passes where the argument is small, scaled."""

    @staticmethod
    def forward(ctx, x, scale=1.0):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.scale * (x.abs() < 1.5), None


round_through = RoundThrough.apply  # a name of its own, as users take it


class Reverse(Function):
    """Returns its input itself; the gradient changes its sign."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -0.3 * grad


class Doubled(Function):
    """A linear layer in the new style whose weight learns twice as fast."""

    @staticmethod
    def forward(x, weight, bias):
        return x @ weight.t() + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight
        if ctx.needs_input_grad[1]:
            grad_weight = 2 * grad.t() @ x
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias


class CountsNeeds(Function):
    """A backward whose values depend on what asks for a gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.number = sum(ctx.needs_input_grad)
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight / ctx.number, grad * x / (1 + sum(ctx.needs_input_grad))


class Halves(Function):
    """Two outputs, of which a caller may use one."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, x.tanh()

    @staticmethod
    def backward(ctx, first, second):
        return first * 0.5 + second * 0.25 + 0.125


class Largest(Function):
    """Values, indices, and a float output that is marked as not differentiable."""

    @staticmethod
    def forward(ctx, x):
        values, places = x.max(dim=1, keepdim=True)
        share = x.softmax(1)
        ctx.mark_non_differentiable(places, share)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return values, places, share

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, no_places, no_share):
        (places,) = ctx.saved_tensors
        found = torch.zeros(ctx.shape, dtype=grad.dtype) + no_share
        return found.scatter_(1, places, grad * 3)


class SavesAll(Function):
    """Saves its output, an intermediate and, as an attribute, a mask."""

    @staticmethod
    def forward(ctx, x):
        inner = x.exp()
        out = inner / (1 + inner)
        ctx.save_for_backward(out, None, inner)
        ctx.mask = x > 0
        return (out,)

    @staticmethod
    def backward(ctx, grad):
        out, nothing, inner = ctx.saved_tensors
        assert nothing is None
        return torch.where(ctx.mask, grad * out, grad * inner.sin())


class Scaled(Function):
    """Takes what is no tensor, by position and by name, and gives no gradient for a tensor."""

    @staticmethod
    def forward(ctx, x, factor, names, other=None):
        ctx.factor, ctx.names = factor, names
        return x * factor + other.mean()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.names["by"], None, None, None


class Broadcast(Function):
    """Gradients of another shape and type than the inputs: PyTorch sums and casts them."""

    @staticmethod
    def forward(ctx, x, bias):
        return x + bias

    @staticmethod
    def backward(ctx, grad):
        return grad.double(), grad * 2


class Nested(Function):
    """Calls other functions in its forward and in its backward."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            y = round_through(x, 0.5)
        ctx.save_for_backward(y)
        return Reverse.apply(y) + Halves.apply(x)[1]

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        with torch.enable_grad():
            return Reverse.apply(grad * y) + round_through(grad * 8)


class InPlace(Function):
    """Writes in place what is its own, and the gradient."""

    @staticmethod
    def forward(ctx, x):
        out = x.clone()
        out.mul_(2).add_(x)
        return out

    @staticmethod
    def backward(ctx, grad):
        found = grad.clone()
        found.mul_(0.5)
        return found.add_(grad)


class Flattens(Function):
    """A backward that asks for a dense gradient, which that of a sum is not."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        flat = grad.contiguous().view(-1)
        return (flat * torch.arange(flat.numel(), device=grad.device)).view(grad.shape)


class ByVjp(Function):
    """The other name of backward, with the gradients in a list and none made of zeros."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.sin()

    @staticmethod
    def vjp(ctx, gradients):
        gradient = gradients.pop() if isinstance(gradients, list) else gradients  # PyTorch 2.11
        return gradient * 1.5


class Constant(Function):
    """A gradient that does not depend on the one that comes in."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0].sign(), grad


class Block(nn.Module):
    """What the blocks below share; `apply` calls the function."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("fixed", torch.linspace(-1, 1, WIDTH))

    def forward(self, x):
        y = self.apply_function(self.before(x) * 2)
        return x + 0.3 * F.gelu(y @ self.weight + self.bias)


def block(call):
    return type("Applies", (Block,), {"apply_function": call})


def uses_closure(self, x):
    class Closure(Function):
        @staticmethod
        def forward(ctx, x):
            return x * self.bias  # no argument: no gradient goes there

        @staticmethod
        def backward(ctx, grad):
            return grad * self.bias * self.fixed

    return Closure.apply(x)


def leaves_aside(self, x):
    aside = []

    class Aside(Function):
        @staticmethod
        def forward(ctx, x):
            aside.append(x * self.bias)  # PyTorch runs this without gradients
            return x + 1

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    return Aside.apply(x) * aside[0]


@torch.library.custom_op("penstock_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """An operator of a user's own, with a gradient registered."""
    return x * 0.5


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, grad: grad * 3)


def without_gradients(self, x):
    with torch.no_grad():
        return round_through(x)


def reentrant(self, x):
    return checkpoint(lambda y: round_through(F.silu(self.before(y))), x, use_reentrant=True)


def not_reentrant(self, x):
    return checkpoint(lambda y: round_through(F.silu(self.before(y))), x, use_reentrant=False)


def saved_on_host(self, x):
    with torch.autograd.graph.save_on_cpu():
        return F.silu(x) * x


CALLS = {
    "straight_through": lambda self, x: round_through(x, 0.5),
    "reversal": lambda self, x: Reverse.apply(x),
    "weight_as_argument": lambda self, x: Doubled.apply(x, self.weight, self.bias),
    "needs_input_grad": lambda self, x: CountsNeeds.apply(
        CountsNeeds.apply(x, self.fixed), self.bias
    ),
    "two_outputs": lambda self, x: sum(Halves.apply(x)),
    "one_output_unused": lambda self, x: Halves.apply(x)[1],
    "non_differentiable": lambda self, x: (lambda v, p, s: v + p + s)(*Largest.apply(x)),
    "saved_values": lambda self, x: SavesAll.apply(x)[0],
    "other_arguments": lambda self, x: Scaled.apply(x, 2.0, {"by": 0.7}, self.bias),
    "shape_and_type": lambda self, x: Broadcast.apply(x, self.bias),
    "nested": lambda self, x: Nested.apply(x),
    "in_place": lambda self, x: InPlace.apply(x).mul_(0.5),
    "dense_gradient": lambda self, x: x + 0.1 * Flattens.apply(x).sum(),
    "vjp": lambda self, x: ByVjp.apply(x),
    "constant_gradient": lambda self, x: Constant.apply(x, x),
    "closure": uses_closure,
    "left_aside": leaves_aside,
    "registered_operator": lambda self, x: halved(x),
    "no_grad": without_gradients,
    "used_twice": lambda self, x: (lambda y: y * y.detach() + y.T.sum())(round_through(x)),
    "checkpoint_reentrant": reentrant,
    "checkpoint_not_reentrant": not_reentrant,
    "saved_on_host": saved_on_host,
}


class Net(nn.Module):
    """Three equal blocks between an inlet and a head."""

    def __init__(self, call):
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(call)() for _ in range(3))
        self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.inlet(x)
        for one in self.blocks:
            x = one(x)
        return self.outlet(x).square().mean()


def net(call, seed=0):
    torch.manual_seed(seed)
    return Net(call), {"x": torch.randn(5, WIDTH)}


def plain(module, rows):
    """Return the loss and the gradients, None where PyTorch gives none."""
    module.zero_grad()
    loss = module(**rows)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in module.named_parameters()}


def assert_equal_gradients(step, reference):
    loss, gradients = reference
    assert step.losses == pytest.approx([loss], rel=1e-5)
    for name, gradient in gradients.items():
        have = step.gradients.get(name)
        if gradient is None:
            assert have is None or not have.any(), name
        else:
            torch.testing.assert_close(have, gradient, rtol=1e-4, atol=1e-6, msg=name)
