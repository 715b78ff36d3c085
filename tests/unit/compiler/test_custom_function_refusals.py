"""What cannot be compiled of a `torch.autograd.Function` is refused with its line."""

import re
from pathlib import Path

import pytest
import torch
from custom_functions import net
from sweeps import compiled
from torch.autograd import Function
from torch.nn import functional as F

from penstock.errors import CompileError


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
        "torch.where or masking, or make the decision outside the model.",
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
        "the forward of Dirty writes one of its inputs in place. Write to a clone of the input, "
        "and remove ctx.mark_dirty.",
    ),
    "input_in_place": (
        lambda self, x: WritesInput.apply(x),
        "lambda self, x: WritesInput.apply(x),",
        "the forward of WritesInput writes one of its inputs in place. Write to a clone of the "
        "input, and remove ctx.mark_dirty.",
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
        "separately. Remove ctx.set_materialize_grads(False), or return one differentiable output.",
    ),
    "by_hand": (
        lambda self, x: ByHand.apply(torch.tanh, x),
        "(found,) = torch.autograd.grad(ctx.run(x), x, grad)",
        "it computes gradients itself (backward, torch.autograd.grad or torch.func). A program's "
        "backward is that of its loss alone: write the derivative as a formula, or remove it from "
        "the forward; the engine decides whether activations are kept or recomputed "
        "(engine.memory).",
    ),
    "kept": (
        lambda self, x: Keeps.apply(x),
        CALL,
        "the backward of a torch.autograd.Function keeps a gradient for other code, which would "
        "never receive a value: return the gradient instead.",
    ),
    "vmap": (
        lambda self, x: torch.func.vmap(Batched.apply)(x),
        "lambda self, x: torch.func.vmap(Batched.apply)(x),",
        "a torch.autograd.Function is called under a transform of torch.func. Call it outside of "
        "torch.func.vmap and similar transforms.",
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
    file, number = re.search(
        r"([^ \"]*custom_function\w*\.py)(?:\", line |:)(\d+)", message
    ).groups()
    assert line in Path(file).read_text().splitlines()[int(number) - 1]
    assert "\n" not in message


def test_evaluation_runs_the_forward_alone_with_custom_functions():
    module, rows = net(NumbersInBackward.apply_in)  # which could not be trained
    program = compiled(module, rows, training=False)
    assert not any(stage.kind.outputs_grad[0] for stage in program.stages)
