"""Deterministic results on a GPU, so that a resumed run equals an uninterrupted one."""

import os

import torch

from penstock.program import Program

# Adds partial sums in nondeterministic order unless PyTorch's deterministic mode is on.
_ONLY_IF_STRICT = "_scaled_dot_product_efficient_attention_backward"


def choose_repeatable_kernels(program: Program) -> None:
    """Make PyTorch, in this process, use kernels with a fixed order of summation.

    Operators without such a kernel are an error only for programs with an attention that needs the
    deterministic mode. In other programs (convolutions, pooling) PyTorch warns, naming the
    operators.
    """
    # cuBLAS reads this at startup; the value equals its default, 8 buffers of 4 MiB.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    strict = any(
        _ONLY_IF_STRICT in str(node.target)
        for kind in {stage.kind.digest: stage.kind for stage in program.stages}.values()
        for graph in kind.graphs.values()
        for node in graph.nodes
    )
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # By default PyTorch would also fill every fresh tensor with NaN to expose uninitialised reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
