"""Functions with a backward of their own, which `random_modules.py` applies."""

from __future__ import annotations

import torch


class Straight(torch.autograd.Function):
    """A straight-through estimator: tanh forward, identity backward."""

    @staticmethod
    def forward(ctx, value):
        return torch.tanh(3 * value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reversed(torch.autograd.Function):
    """A gradient reversal layer with a scale that needs none."""

    @staticmethod
    def forward(ctx, value, scale):
        ctx.scale = scale
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Product(torch.autograd.Function):
    """Two arguments and two results; saves tensors; the gradient is not the true one."""

    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(left, right)
        return left * right, left.sum(1)

    @staticmethod
    def backward(ctx, of_product, of_sum):
        left, right = ctx.saved_tensors
        return of_product * right * 0.5, of_product * left + of_sum[:, None]


class Doubled(torch.autograd.Function):
    """Writes its argument in place, and says so."""

    @staticmethod
    def forward(ctx, value):
        ctx.mark_dirty(value)
        return value.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3
