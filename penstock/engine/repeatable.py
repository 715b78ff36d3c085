"""The same bits from the same step on a GPU, so that a resumed run equals one never stopped."""

from __future__ import annotations

import os

import torch

from penstock.program import Program

# Adds partial sums in the order in which they happen to come, unless PyTorch is told to insist.
_ONLY_IF_STRICT = "_scaled_dot_product_efficient_attention_backward"


def choose_repeatable_kernels(program: Program) -> None:
    """Tell PyTorch, for this process, to take kernels whose sums have one order.

    It refuses operators without such a kernel only for programs with an attention that needs the
    insistence; in others (convolutions, pooling) it warns of them by name and goes on.
    """
    # cuBLAS reads this when it starts; 8 buffers of 4 MiB are what it takes by default.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    strict = any(
        _ONLY_IF_STRICT in str(node.target)
        for kind in {stage.kind.digest: stage.kind for stage in program.stages}.values()
        for graph in kind.graphs.values()
        for node in graph.nodes
    )
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # PyTorch would also fill every fresh tensor with NaN to betray whoever reads it unwritten.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
