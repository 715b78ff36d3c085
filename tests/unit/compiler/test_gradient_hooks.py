"""Hooks on gradients are refused with the place and the way out; hooks on the forward are code."""

import functools
import re
import threading

import pytest
import torch
from sweeps import compiled, one_step
from torch import nn
from torch.autograd import graph
from torch.nn.modules import module as every_module

from penstock.errors import CompileError


class Block(nn.Module):
    def __init__(self, watch=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.watch = watch or (lambda self, y: None)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.watch(self, y)
        return y


class Net(nn.Module):
    def __init__(self, watch=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(watch)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def rows():
    return {"x": torch.randn(3, 4)}


def halve(gradient):
    return gradient / 2


CHANGE = (
    "To change a gradient, apply a torch.autograd.Function with that backward in the forward; a "
    "hook that only reads a gradient must be removed."
)
DERIVATIVE = (
    "it computes gradients itself (backward, torch.autograd.grad or torch.func). A program's "
    "backward is that of its loss alone: write the derivative as a formula, or remove it from the "
    "forward; the engine decides whether activations are kept or recomputed (engine.memory)."
)
GRAD_FN = (
    "it reads grad_fn, which has no counterpart in a compiled program. To know whether a tensor "
    f"takes part in training, read requires_grad. {CHANGE}"
)


def saves_by_hooks(block, y):
    with graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return y * y


IN_FORWARD = {
    "register_hook": (
        lambda block, y: y.register_hook(halve),
        f"it registers a hook on the gradient of a tensor, which no compiled program calls. "
        f"{CHANGE}",
    ),
    "parameter": (
        lambda block, y: block.linear.weight.register_hook(halve),
        f"it registers a hook on the gradient of a tensor, which no compiled program calls. "
        f"{CHANGE}",
    ),
    "post_accumulate": (
        lambda block, y: block.linear.weight.register_post_accumulate_grad_hook(print),
        f"it registers a hook on a gradient, which no compiled program calls. {CHANGE}",
    ),
    # It only watches, but whoever reads .grad would find None.
    "retain_grad": (
        lambda block, y: y.retain_grad(),
        f"it asks to keep the gradient of a tensor (retain_grad), which no compiled program calls. "
        f"{CHANGE}",
    ),
    "multi_grad_hook": (
        lambda block, y: graph.register_multi_grad_hook([y, block.linear.weight], print),
        GRAD_FN,
    ),
    "multi_grad_hook_any": (
        lambda block, y: graph.register_multi_grad_hook([y], print, mode="any"),
        f"it registers a hook on the gradient of a tensor, which no compiled program calls. "
        f"{CHANGE}",
    ),
    "node_hook": (lambda block, y: y.grad_fn.register_hook(print), GRAD_FN),
    "saved_tensors_hooks": (
        saves_by_hooks,
        f"it enters torch.autograd.graph.saved_tensors_hooks. {CHANGE}",
    ),
    "gradient_penalty": (
        lambda block, y: torch.autograd.grad(y.sum(), block.linear.weight, create_graph=True),
        DERIVATIVE,
    ),
    "backward": (lambda block, y: y.sum().backward(), DERIVATIVE),
    "torch_func": (lambda block, y: torch.func.grad(lambda z: z.sin().sum())(y), DERIVATIVE),
    "jacobian": (lambda block, y: torch.autograd.functional.jacobian(torch.sin, y), DERIVATIVE),
}


IN_LINE = {
    "parameter": "weight.register_hook",
    "post_accumulate": "register_post_accumulate_grad_hook",
    "multi_grad_hook_any": 'mode="any"',
    "node_hook": "grad_fn.register_hook",
    "gradient_penalty": "create_graph=True",
    "torch_func": "torch.func.grad",
}


@pytest.mark.parametrize("kind", IN_FORWARD)
def test_forward_that_hooks_or_computes_gradients_is_refused_with_its_line(kind):
    watch, end = IN_FORWARD[kind]
    with pytest.raises(CompileError) as caught:
        compiled(Net(watch), rows())
    message = str(caught.value)
    assert message.startswith("cannot capture blocks.1 (Block) at ")
    assert message.endswith(end)
    (number,) = re.findall(r"test_gradient_hooks\.py:(\d+): ", message)
    with open(__file__) as file:
        line = file.read().splitlines()[int(number) - 1]
    assert f": {line.strip()!r}: " in message
    assert IN_LINE.get(kind, kind) in line
    compiled(Net(), rows())  # nothing of the refusal stays behind


ON_MODULES = {
    "full backward hook": lambda net, hook: net.blocks[1].register_full_backward_hook(hook),
    "full backward pre-hook": lambda net, hook: net.blocks[1].register_full_backward_pre_hook(hook),
    "backward hook": lambda net, hook: net.blocks[1].register_backward_hook(hook),
}
ON_PARAMETERS = {
    "hook on its gradient (register_hook)": lambda net, hook: net.blocks[
        1
    ].linear.weight.register_hook(hook),
    "hook (register_post_accumulate_grad_hook)": lambda net, hook: net.blocks[
        1
    ].linear.weight.register_post_accumulate_grad_hook(hook),
}
HOOKS = {
    **{f"blocks.1 (Block) has a {kind}": add for kind, add in ON_MODULES.items()},
    **{f"parameter blocks.1.linear.weight has a {k}": add for k, add in ON_PARAMETERS.items()},
}


def refusal(what):
    line = halve.__code__.co_firstlineno
    return f"{what}, halve at {__file__}:{line}, which no compiled program calls. {CHANGE}"


@pytest.mark.parametrize("what", HOOKS)
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "partial"])
def test_hook_on_module_or_parameter_is_refused_by_name(what, wrap):
    net = Net()
    handle = HOOKS[what](net, functools.partial(halve) if wrap else halve)
    with pytest.raises(CompileError) as caught:
        compiled(net, rows())
    assert str(caught.value) == refusal(what)
    if "full" in what or "parameter" in what:  # PyTorch itself warns of the other kind
        compiled(net, rows(), training=False)  # where there is no backward, no hook is missed
    handle.remove()
    compiled(net, rows())


@pytest.mark.parametrize("add", ["register_module_full_backward_hook"])
def test_hook_on_all_modules_is_refused(add):
    handle = getattr(every_module, add)(halve)
    try:
        with pytest.raises(CompileError) as caught:
            compiled(Net(), rows())
    finally:
        handle.remove()
    assert str(caught.value) == refusal("torch.nn has a backward hook for all modules")


def registers_in_forward(block, y):
    handle = block.linear.register_full_backward_hook(halve)
    block.linear(y)
    handle.remove()


def test_module_hook_registered_in_the_forward_is_refused():
    with pytest.raises(CompileError) as caught:
        compiled(Net(registers_in_forward), rows())
    assert str(caught.value).startswith("cannot capture blocks.1")
    assert str(caught.value).endswith(
        "a backward hook of a module is active. Remove it, or write what it does as a "
        "torch.autograd.Function."
    )


def test_forward_hooks_are_part_of_the_model():
    def double(module, inputs, output):
        return output * 2

    def shift(module, inputs):
        return (inputs[0] + 1,)

    net, batch = Net(), rows()
    net.blocks[0].register_forward_hook(double)
    net.blocks[1].linear.register_forward_pre_hook(shift)
    step = one_step(net, [batch])
    loss = net(**batch)
    loss.backward()
    assert step.losses == pytest.approx([float(loss.detach())], rel=1e-6)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad)


def test_tensors_have_their_own_methods_after_a_compilation():
    names = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad_fn")
    before = {name: vars(torch.Tensor).get(name) for name in names}
    with pytest.raises(CompileError):
        compiled(Net(lambda self, y: y.register_hook(halve)), rows())
    assert {name: vars(torch.Tensor).get(name) for name in names} == before
    seen = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(seen.append)
    (2 * leaf).sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[2.0, 2.0]]


def test_another_thread_may_use_hooks_while_a_module_is_compiled():
    found = []

    def elsewhere():
        leaf = torch.ones(2, requires_grad=True)
        leaf.register_hook(found.append)
        found.append((2 * leaf).grad_fn is not None)

    def start(self, y):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    compiled(Net(start), rows())
    assert found == [True]
