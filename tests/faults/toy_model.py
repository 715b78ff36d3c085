"""The model of the simulated runs, and what it must become.

It is three stages of 17 weights each, whose gradients depend on all weights before them, on the
rows and on the micro-batch, in float32, so that another order of additions, a stale weight or a
part that is counted twice changes the result. What it must be is computed by a loop without any
network.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from penstock.collectives.tree_reduce import PartialSum, TreeReduction
from penstock.distributed.protocol.transfer_schedule import Chunk

STAGES, WEIGHTS, MICRO_BATCHES, STEPS = 3, 17, 8, 3


def initial() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(WEIGHTS).astype(np.float32) for _ in range(STAGES)]


def rows_of(step: int) -> np.ndarray:
    generator = np.random.default_rng(step)
    return generator.standard_normal((MICRO_BATCHES, WEIGHTS)).astype(np.float32)


def forward(weights: list[np.ndarray], row: np.ndarray) -> list[np.ndarray]:
    """The input of every stage, and the last output."""
    values = [row]
    for weight in weights:
        values.append(np.tanh(values[-1] * weight + np.float32(0.1)))
    return values


def backward(weight: np.ndarray, value: np.ndarray, made: np.ndarray, grad: np.ndarray):
    inner = grad * (1 - made * made)
    return inner * value, inner * weight


def updated(weight: np.ndarray, gradient: np.ndarray, scale: float) -> np.ndarray:
    return weight - np.float32(0.5 * scale) * gradient


def norm_of(squares: dict[str, float]) -> float:
    return math.sqrt(math.fsum(squares[key] for key in sorted(squares)))


def squares_of(stage: int, piece: Chunk, gradient: np.ndarray) -> dict[str, str]:
    """By element, so that no division over shards changes the sum."""
    return {f"{stage}:{piece.begin + i:04d}": (float(x) ** 2).hex() for i, x in enumerate(gradient)}


def reference(steps: int = STEPS) -> tuple[list[list[float]], list[np.ndarray]]:
    """Losses by step, and the weights at the end, without shards, engines or a network."""
    weights, losses = initial(), []
    for step in range(1, steps + 1):
        sums = [TreeReduction(MICRO_BATCHES) for _ in weights]
        losses.append([])
        for index, row in enumerate(rows_of(step)):
            values = forward(weights, row)
            losses[-1].append(float(values[-1].sum()))
            grad = np.ones(WEIGHTS, np.float32)
            for stage in reversed(range(STAGES)):
                own, grad = backward(weights[stage], values[stage], values[stage + 1], grad)
                sums[stage].add(PartialSum(0, index, (torch.from_numpy(own),)))
        gradients = [total.root()[0].numpy() for total in sums]
        squares = {}
        for stage, gradient in enumerate(gradients):
            whole = squares_of(stage, Chunk(0, 0, 0, WEIGHTS, 4), gradient)
            squares |= {key: float.fromhex(value) for key, value in whole.items()}
        scale = min(1.0, 1.0 / norm_of(squares))
        weights = [updated(w, g, scale) for w, g in zip(weights, gradients, strict=True)]
    return losses, weights
