"""The gradient of a `torch.autograd.Function` is what its backward says, as in plain PyTorch."""

import copy
import re

import pytest
import torch
from sweeps import compiled, one_step
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock.engine import EnginePlan
from penstock.errors import CompileError

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
        return gradients.pop() * 1.5


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


@pytest.mark.parametrize("name", CALLS)
def test_gradients_equal_plain_pytorch_with_custom_function(name):
    module, rows = net(CALLS[name])
    assert_equal_gradients(one_step(module, [rows]), plain(module, rows))


def mixed(self, x):
    y = Doubled.apply(round_through(x), self.weight, self.bias)
    y = F.dropout(Reverse.apply(y), 0.25, self.training)
    return SavesAll.apply(y + Halves.apply(x)[1])[0]


def test_equal_blocks_share_a_kind_with_custom_functions():
    module, rows = net(mixed)
    program = compiled(module, rows)
    kinds = {stage.name: stage.kind for stage in program.stages}
    assert kinds["blocks.1"] is kinds["blocks.2"]
    other, _ = net(lambda self, x: mixed(self, x) * 2)
    assert compiled(other, rows).stages[1].kind.digest != kinds["blocks.1"].digest


def test_blocks_with_other_backwards_have_other_kinds():
    module, rows = net(CALLS["straight_through"])
    module.blocks[2].apply_function = lambda x: round_through(x, 0.25)
    kinds = {stage.name: stage.kind.digest for stage in compiled(module, rows).stages}
    assert kinds["blocks.0"] == kinds["blocks.1"] != kinds["blocks.2"]
    assert_equal_gradients(one_step(module, [rows]), plain(module, rows))


def test_compiled_functions_hold_only_operators_with_custom_functions():
    module, rows = net(CALLS["nested"])
    for stage in compiled(module, rows).stages:
        for graph in stage.kind.graphs.values():
            targets = {n.target for n in graph.nodes if n.op == "call_function"}
            own = {t for t in targets if not isinstance(t, torch._ops.OpOverload)}
            assert {t.__name__ for t in own} <= {"getitem"}


@pytest.mark.parametrize("options", [{}, {"slot_bytes": 200}], ids=["whole", "cut"])
def test_recomputed_stages_give_the_same_bits_with_custom_functions(options):
    module, rows = net(mixed)
    kept = one_step(module, [rows, rows], **options)
    stages = range(len(compiled(module, rows, **options).stages) - 1)
    made_again = one_step(module, [rows, rows], EnginePlan(recompute=frozenset(stages)), **options)
    assert kept.losses == made_again.losses
    for name, gradient in kept.gradients.items():
        assert torch.equal(gradient, made_again.gradients[name]), name
        assert gradient.any(), name


@pytest.mark.parametrize("name", ["weight_as_argument", "two_outputs", "reversal", "nested"])
def test_cut_stages_give_the_same_gradients_with_custom_functions(name):
    module, rows = net(CALLS[name])
    cut = one_step(module, [rows], slot_bytes=200)
    assert len(compiled(module, rows, slot_bytes=200).stages) > 6
    assert_equal_gradients(cut, plain(module, rows))


@pytest.mark.parametrize("frozen", [("inlet.*", "blocks.0.before.*"), ("blocks.*.bias",)])
def test_a_backward_that_asks_for_needs_input_grad_sees_what_is_frozen(frozen):
    module, rows = net(CALLS["needs_input_grad"])
    step = one_step(module, [rows], freeze=frozen)
    assert all(p.requires_grad for p in module.parameters())
    for pattern in frozen:
        for name, parameter in module.named_parameters():
            if re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), name):
                parameter.requires_grad_(False)
    loss, gradients = plain(module, rows)
    trained = {n: g for n, g in gradients.items() if module.get_parameter(n).requires_grad}
    assert trained.keys() == step.gradients.keys()
    assert_equal_gradients(step, (loss, trained))


@pytest.mark.parametrize("name", ["straight_through", "weight_as_argument", "saved_values"])
def test_bfloat16_gradients_are_those_of_a_bfloat16_module_with_custom_functions(name):
    module, rows = net(CALLS[name])
    step = one_step(module, [rows], precision="bf16")
    lower = copy.deepcopy(module).bfloat16()
    loss, gradients = plain(lower, {"x": rows["x"].bfloat16()})
    assert step.losses == pytest.approx([loss], rel=2e-2)
    for weight, gradient in gradients.items():
        scale = float(gradient.abs().max())
        have = step.gradients[weight].float()
        assert float((have - gradient.float()).abs().max()) <= 0.05 * scale, weight


def test_evaluation_runs_the_forward_alone_with_custom_functions():
    module, rows = net(NumbersInBackward.apply_in)  # which could not be trained
    program = compiled(module, rows, training=False)
    assert not any(stage.kind.outputs_grad[0] for stage in program.stages)


class NumbersInBackward(Function):
    """A backward that needs the value of a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad / float(grad.norm())

    @staticmethod
    def apply_in(self, x):
        return NumbersInBackward.apply(x)


class DrawsInBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad + torch.randn_like(grad)


class DropsInBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return F.dropout(grad)


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class WritesInput(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


class TooFew(Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad


class Misshapen(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.t()


class ForANumber(Function):
    @staticmethod
    def forward(ctx, x, scale):
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum()


class NotMaterialised(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return first if second is None else second


class ByHand(Function):
    """Activation checkpointing written by hand."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            (found,) = torch.autograd.grad(ctx.run(x), x, grad)
        return None, found


KEPT = []


class Keeps(Function):
    @staticmethod
    def forward(ctx, x):
        return x + KEPT[-1].mean() if KEPT else x * 2

    @staticmethod
    def backward(ctx, grad):
        KEPT.append(grad)
        return grad


class Batched(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


# What is found in the graph has the line of the module that calls the function.
CALL = "y = self.apply_function(self.before(x) * 2)"
PLAIN = "Check that the module trains with these inputs in plain PyTorch."
REFUSED = {
    "value": (
        NumbersInBackward.apply_in,
        "return grad / float(grad.norm())",
        "The forward needs the value of a tensor, which no ahead-of-time graph can hold: use "
        "torch.where or masking, or take the decision outside the model.",
    ),
    "random": (
        lambda self, x: DrawsInBackward.apply(x),
        CALL,
        "draws random numbers with aten.randn_like.default, which a replayed step could not "
        "repeat; use torch.nn.Dropout, or pass the random values as an input.",
    ),
    "dropout": (
        lambda self, x: DropsInBackward.apply(x),
        CALL,
        "draws random numbers in the backward of a torch.autograd.Function, which a replayed step "
        "could not repeat: draw them in its forward with torch.nn.functional.dropout, and save "
        "them.",
    ),
    "mark_dirty": (
        lambda self, x: Dirty.apply(x),
        "lambda self, x: Dirty.apply(x),",
        "the forward of Dirty writes one of its inputs in place. Write to a clone of it, and leave "
        "ctx.mark_dirty out.",
    ),
    "input_in_place": (
        lambda self, x: WritesInput.apply(x),
        "lambda self, x: WritesInput.apply(x),",
        "the forward of WritesInput writes one of its inputs in place. Write to a clone of it, and "
        "leave ctx.mark_dirty out.",
    ),
    "too_few": (
        lambda self, x: TooFew.apply(x, x),
        "lambda self, x: TooFew.apply(x, x),",
        f"the backward of TooFew returns 1 gradients, its forward takes 2 inputs. {PLAIN}",
    ),
    "misshapen": (
        lambda self, x: Misshapen.apply(x),
        "lambda self, x: Misshapen.apply(x),",
        "the backward of Misshapen returns, for input 0, a gradient of shape (6, 5); the input has "
        f"shape (5, 6). {PLAIN}",
    ),
    "for_a_number": (
        lambda self, x: ForANumber.apply(x, 2.0),
        "lambda self, x: ForANumber.apply(x, 2.0),",
        f"the backward of ForANumber returns a tensor as the gradient of input 1, which is of type "
        f"float. {PLAIN}",
    ),
    "not_materialised": (
        lambda self, x: NotMaterialised.apply(x)[0],
        "lambda self, x: NotMaterialised.apply(x)[0],",
        "NotMaterialised has 2 differentiable outputs and calls ctx.set_materialize_grads(False): "
        "which gradients are None depends on the rest of the model, and its backward is traced "
        "apart from it. Leave ctx.set_materialize_grads(False) out, or return one differentiable "
        "output.",
    ),
    "by_hand": (
        lambda self, x: ByHand.apply(torch.tanh, x),
        "(found,) = torch.autograd.grad(ctx.run(x), x, grad)",
        "it computes gradients itself (backward, torch.autograd.grad or torch.func). A program's "
        "backward is that of its loss alone: write the derivative as a formula, or remove it from "
        "the forward; whether activations are kept or made again is the engine's to decide "
        "(engine.memory).",
    ),
    "kept": (
        lambda self, x: Keeps.apply(x),
        CALL,
        "the backward of a torch.autograd.Function keeps a gradient for code outside of it, which "
        "would never see a value: what it computes may only be returned.",
    ),
    "vmap": (
        lambda self, x: torch.func.vmap(Batched.apply)(x),
        "lambda self, x: torch.func.vmap(Batched.apply)(x),",
        "a torch.autograd.Function is called under a transform of torch.func. Call it outside of "
        "torch.func.vmap and its like.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_custom_function_that_cannot_be_compiled_is_refused_with_its_line(name):
    call, line, end = REFUSED[name]
    module, rows = net(call)
    with pytest.raises(CompileError) as caught:
        compiled(module, rows)
    message = str(caught.value)
    assert "blocks.0" in message or name == "kept"
    assert message.endswith(end)
    number = re.search(r"test_custom_functions\.py(?:\", line |:)(\d+)", message)
    with open(__file__) as file:
        assert line in file.read().splitlines()[int(number.group(1)) - 1]
    assert "\n" not in message


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


def symmetric(layer):
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def parametrized(wrap):
    module, rows = net(lambda self, x: self.before(x))
    for one in module.blocks:
        one.before = wrap(one.before)
    return module, rows


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.orthogonal, symmetric]
)
def test_parametrized_weights_train_as_in_plain_pytorch(wrap):
    module, rows = parametrized(wrap)
    assert_equal_gradients(one_step(module, [rows]), plain(module, rows))


def test_spectral_norm_is_refused():
    module, rows = parametrized(parametrizations.spectral_norm)
    with pytest.raises(CompileError, match=r"blocks\.0\.before|_u|buffer"):
        compiled(module, rows)
