"""Random small modules that do what users' forwards do: made from a seed, twice the same.

A module is a stack of blocks over rows of `WIDTH` numbers. Each block has one or two *actions*, and
every action belongs to a feature of PyTorch that a compiler may get wrong without a word: views
that are written, custom backward functions, hooks, modes, shared storage.
`RandomModule.features` says which ones a module has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from random_functions import Doubled, Product, Reversed, Straight
from torch import nn
from torch.nn import functional as F
from views_and_writes import (
    DETACHED_VIEWS,
    KEEP_THEIR_RESULT,
    MULTIPLE_VIEWS,
    ROWS,
    SINGLE_VIEWS,
    WIDTH,
    WRITES,
)

Tensor = torch.Tensor
Dice = random.Random


class Action(nn.Module):
    """One thing that a block does to its rows; `features` says what."""

    def __init__(self, dice: Dice) -> None:
        super().__init__()
        self.features: set[str] = set()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """[ROWS, WIDTH] each: hidden rows and two inputs; returns hidden rows."""
        return torch.tanh(self.linear(h))


class WritesAView(Action):
    """Writes a view of a tensor, then reads the tensor and a view that was made before."""

    BASES = ("zeros", "input", "input copy", "hidden", "product", "literal", "constant mix")

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice)
        self.base = dice.choice(self.BASES)
        needs_gradient = self.base in ("hidden", "product")
        views = SINGLE_VIEWS if needs_gradient else {**SINGLE_VIEWS, **MULTIPLE_VIEWS}
        if dice.random() < 0.04:
            views = DETACHED_VIEWS
        self.view = dice.choice([*views])
        self.write = dice.choice([*WRITES])
        self.also_before, self.twice = dice.random() < 0.5, dice.random() < 0.3
        self.second_write = dice.choice([*WRITES])
        self.features = {"in-place write", f"view {self.view}", f"write {self.write}"}
        self.features.add(f"write to {self.base}")

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = torch.tanh(self.linear(h))
        value = y.mean()
        base = self._base(h, x, z, y)
        early = base[:, 1:4] if self.also_before else None
        view = {**SINGLE_VIEWS, **MULTIPLE_VIEWS, **DETACHED_VIEWS}[self.view](base)
        if self.view in MULTIPLE_VIEWS:
            value = value.detach()  # autograd refuses to write a gradient into one of many views
        self._write(self.write, view, value)
        if self.twice and self.write not in KEEP_THEIR_RESULT:
            self._write(self.second_write, base[:, 2:7], value)
        result = h + y * 0.5 + torch.tanh(base)
        if early is not None:
            result = result + early.mean(1, keepdim=True)
        return result + view.sum() * 0.01

    def _write(self, name: str, view: Tensor, value: Tensor) -> None:
        if name == "out" and (view.requires_grad or value.requires_grad):
            name = "fill_"  # autograd refuses out= there
        WRITES[name](view, value)

    def _base(self, h: Tensor, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        return {
            "zeros": lambda: torch.zeros(ROWS, WIDTH),
            "input": lambda: x,
            "input copy": lambda: z.clone(),
            "hidden": lambda: h.clone(),
            "product": lambda: self.linear(h) * 1.0,
            "literal": lambda: torch.tensor([[0.5] * WIDTH] * ROWS),
            "constant mix": lambda: torch.ones_like(h) * z,
        }[self.base]()


class WritesWhatItMade(Action):
    """In-place activations and accumulations, as most models have them."""

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice)
        self.activation = dice.choice([nn.ELU(inplace=True), nn.SiLU(inplace=True), nn.Tanh()])
        self.dropout = nn.Dropout(0.0, inplace=dice.random() < 0.5)
        self.keeps_type = dice.random() < 0.3
        self.features = {"in-place write", "dropout of nothing"}

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = self.dropout(self.linear(h))
        y += h
        y = self.activation(y)
        if self.keeps_type:
            count = torch.arange(WIDTH)
            count += 1  # int64 stays
            count = count.float().mul_(0.1)
            y = y * count
        y = y * 0.5
        h = h.clone()
        h -= y
        return h.add_(x).unsqueeze_(0).transpose_(0, 1).squeeze_(1)


class WithoutGradients(Action):
    """Regions without gradients, with gradients within, detached values, writes in between."""

    KINDS = (
        "computes",
        "nested",
        "decorated",
        "fills",
        "fills from outside",
        "writes weighted",
        "detach",
        "data",
        "detach_",
        "writes a detached copy",
        "writes hidden",
    )

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice)
        self.kind = dice.choice(self.KINDS)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.features = {"no_grad or detach", f"no_grad {self.kind}"}

    @torch.no_grad()
    def _decorated(self, h: Tensor) -> Tensor:
        return self.linear(h).sigmoid()

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        kind = self.kind
        y = torch.tanh(self.linear(h) + self.other(x))
        if kind == "computes":
            with torch.no_grad():
                gate = torch.sigmoid(self.linear(h)) * 2
        elif kind == "nested":
            with torch.no_grad():
                gate = torch.sigmoid(self.linear(h))
                with torch.enable_grad():
                    gate = gate + torch.sigmoid(self.other(h))
                gate = gate + self.linear(x).mean()
        elif kind == "decorated":
            gate = self._decorated(h) + self.linear.weight.mean()
        elif kind == "fills":
            with torch.no_grad():
                gate = torch.zeros(ROWS, WIDTH)
                gate.copy_(self.linear(h))
                gate[:, :2].mul_(3)
        elif kind == "fills from outside":
            gate = torch.ones(ROWS, WIDTH)
            with torch.no_grad():
                gate[:, 1:3] = h[:, :2]
                gate.mul_(0.5)
        elif kind == "writes weighted":
            gate = torch.ones(ROWS, WIDTH)
            with torch.no_grad():
                gate.zero_()
            gate[:, :4] = h[:, 4:]
            with torch.no_grad():
                scale = gate * 0.1
            gate = gate + scale
        elif kind == "detach":
            gate = h.detach() * 0.5 + self.linear(h.detach())
        elif kind == "data":
            gate = (h * 2).data + self.linear.weight.data.mean()
        elif kind == "detach_":
            gate = self.linear(h)
            gate.detach_()
            gate = gate * 0.3
        elif kind == "writes a detached copy":
            gate = h.detach().clone()
            gate.mul_(2)
            gate[1] = y[0]
        else:
            gate = h * 1.0
            with torch.no_grad():
                gate.mul_(0.5)
        return h + y * gate


class CustomBackward(Action):
    """Functions with a backward of their own."""

    KINDS = ("straight", "reversed", "product", "dirty", "of a weight")

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice)
        self.kind = dice.choice(self.KINDS)
        self.features = {"custom function", f"custom {self.kind}"}

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = self.linear(h)
        if self.kind == "straight":
            y = Straight.apply(y)
        elif self.kind == "reversed":
            y = Reversed.apply(y, 0.5)
        elif self.kind == "product":
            both, total = Product.apply(y, h)
            y = both + total[:, None] * 0.1
        elif self.kind == "dirty":
            y = Doubled.apply(y * 1.0)
        else:
            y = F.linear(h, Straight.apply(self.linear.weight))
        return h + torch.tanh(y)


def _halved(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def _halved_output(module: nn.Module, given: object, output: Tensor) -> Tensor:
    return output * 0.5


def _shifted_input(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    return (given[0] + 0.1,)


def _halved_backward(module: nn.Module, of_inputs: tuple, of_outputs: tuple) -> tuple:
    return tuple(None if g is None else g * 0.5 for g in of_inputs)


class Hooked(Action):
    """Hooks on the forward, which a capture sees, and on gradients, which it may not."""

    FORWARD = ("forward hook", "forward pre-hook")
    BACKWARD = ("tensor hook", "parameter hook", "full backward hook", "accumulated hook")

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice)
        self.kind = dice.choice(self.FORWARD if dice.random() < 0.75 else self.BACKWARD)
        if self.kind == "forward hook":
            self.linear.register_forward_hook(_halved_output)
        elif self.kind == "forward pre-hook":
            self.linear.register_forward_pre_hook(_shifted_input)
        elif self.kind == "parameter hook":
            self.linear.weight.register_hook(_halved)
        elif self.kind == "full backward hook":
            self.linear.register_full_backward_hook(_halved_backward)
        elif self.kind == "accumulated hook":
            self.linear.weight.register_post_accumulate_grad_hook(_halve_in_place)
        self.features = {"hook", self.kind}

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = self.linear(h)
        if self.kind == "tensor hook":
            y.register_hook(_halved)
        return h + torch.tanh(y)


def _halve_in_place(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


class BranchesOnMode(Action):
    """Does something else while it trains, and may be a part in eval mode."""

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice)
        self.stays = dice.random() < 0.5
        self.norm = dice.choice(["none", "dropout", "batch norm", "instance norm"])
        if self.norm == "dropout":
            self.part = nn.Dropout(0.0)
        elif self.norm == "batch norm":
            self.part = nn.BatchNorm1d(WIDTH, track_running_stats=dice.random() < 0.4)
        elif self.norm == "instance norm":
            self.part = nn.InstanceNorm1d(
                WIDTH, affine=True, track_running_stats=dice.random() < 0.5
            )
        else:
            self.part = nn.Identity()
        self.features = {"branch on training", f"mode with {self.norm}"}
        if self.stays:
            self.features.add("part in eval mode")
            if self.norm == "dropout":
                self.part = nn.Dropout(0.5)
            for norm in (n for n in (self.part,) if getattr(n, "running_mean", None) is not None):
                norm.running_mean.uniform_(-0.2, 0.2)
                norm.running_var.uniform_(0.8, 1.2)
            self.part.eval()

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = self.linear(h)
        y = (
            self.part(y[..., None].expand(-1, -1, 3))[..., 0]
            if self._is_instance()
            else (self.part(y))
        )
        y = y * 0.5 if self.part.training else y * 2.0
        return h + (torch.tanh(y) if self.training else torch.sin(y))

    def _is_instance(self) -> bool:
        return self.norm == "instance norm"


class SharesStorage(Action):
    """Two parameters over one memory: one object, two objects, or parts of each other."""

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice)
        exact = dice.random() < 0.7
        self.kind = dice.choice(
            ["tied", "tied", "same storage"]
            if exact
            else ["transposed", "part", "buffer of a weight"]
        )
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        weight = self.linear.weight
        if self.kind == "tied":
            self.other.weight = weight
        elif self.kind == "same storage":
            self.other.weight = nn.Parameter(weight.data)
        elif self.kind == "transposed":
            self.other.weight = nn.Parameter(weight.data.t())
        elif self.kind == "part":
            self.other.weight = nn.Parameter(weight.data[2:4])
        else:
            self.register_buffer("table", weight.data[0])
        self.features = {"shared storage", self.kind}

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = torch.tanh(self.linear(h))
        if self.kind == "part":
            return h + y + self.other(h).sum(1, keepdim=True)
        if self.kind == "buffer of a weight":
            y = y + self.table
        return h + torch.tanh(self.other(y))


class HasBuffers(Action):
    """Reads a buffer or an attribute, or writes one, itself or through a view."""

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice)
        self.register_buffer("table", torch.rand(ROWS, WIDTH))
        self.register_buffer("hidden_table", torch.rand(WIDTH), persistent=False)
        self.attribute = torch.rand(WIDTH)
        written = dice.random() < 0.2
        self.written = dice.choice(["buffer", "view", "attribute", "weight"]) if written else ""
        self.features = {f"{self.written} written" if written else "buffer read"}

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        with torch.no_grad() if self.written else nullcontext():
            if self.written == "buffer":
                self.table.mul_(0.9)
            elif self.written == "view":
                self.table.chunk(2, 1)[0].add_(h[:, :4].mean())
            elif self.written == "attribute":
                self.attribute.add_(0.1)
            elif self.written == "weight":
                self.linear.weight[0].mul_(0.9)
        early = self.table * 1
        return h + torch.tanh(self.linear(h)) * early + self.hidden_table * self.attribute


class Frozen(Action):
    """A layer that does not train between layers that do; writes to what it makes are legal."""

    def __init__(self, dice: Dice) -> None:
        super().__init__(dice)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.features = {"frozen layer"}

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        y = self.frozen(z)
        y.chunk(2, 1)[0].mul_(2)
        return h + torch.tanh(self.linear(h)) * y


ACTIONS: list[tuple[type[Action], int]] = [
    (Action, 2),
    (WritesAView, 8),
    (WritesWhatItMade, 3),
    (WithoutGradients, 3),
    (CustomBackward, 2),
    (Hooked, 1),
    (BranchesOnMode, 2),
    (SharesStorage, 1),
    (HasBuffers, 2),
    (Frozen, 1),
]


class Block(nn.Module):
    """Some actions and a norm, which keeps numbers of one size."""

    def __init__(self, actions: list[Action]) -> None:
        super().__init__()
        self.actions = nn.Sequential(*actions)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor, x: Tensor, z: Tensor) -> Tensor:
        for action in self.actions:
            h = action(h, x, z)
        return self.norm(h)


class RandomModule(nn.Module):
    """A module of a seed; built twice it is twice the same, weights and all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = Dice(seed)
        torch.manual_seed(seed)
        kinds = dice.choices([k for k, _ in ACTIONS], [w for _, w in ACTIONS], k=4)
        equal = dice.random() < 0.3  # blocks of one kind
        sizes = dice.choice([(1, 1, 1), (2, 1), (2, 2), (1, 2)])
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self._blocks(dice, kinds, sizes, equal))
        self.outlet = nn.Linear(WIDTH, WIDTH)
        actions = [a for block in self.blocks for a in block.actions]
        self.features = set().union(*(a.features for a in actions), {"several inputs"})
        if equal:
            self.features.add("equal blocks")

    @staticmethod
    def _blocks(
        dice: Dice, kinds: list[type[Action]], sizes: tuple[int, ...], equal: bool
    ) -> Iterator[Block]:
        state, start = dice.getstate(), 0
        for size in sizes:
            if equal:
                dice.setstate(state)
                start = 0
            yield Block([kind(dice) for kind in kinds[start : start + size]])
            start += size

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """Two inputs [ROWS, WIDTH] to rows of the same shape."""
        h = torch.tanh(self.inlet(x) + z)
        for block in self.blocks:
            h = block(h, x, z)
        return self.outlet(h)
