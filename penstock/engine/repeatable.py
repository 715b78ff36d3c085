"""Deterministic results on a GPU, so that a resumed run equals an uninterrupted one."""

import os

import torch

from penstock.program import Program

# They add partial sums in a fixed order only if PyTorch's deterministic mode is on and is no mere
# warning (ATen/native/transformers/cuda/attention_backward.cu). A third one, of cuDNN, has no fixed
# order and is never traced (`compiler/joint_tracing.py`).
_ONLY_IF_STRICT = (
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
)


# The backward of cuDNN's recurrent layers has no fixed order of sums, and no deterministic mode.
_NOT_BY_CUDNN = ("penstock.recurrent_layer",)


def choose_repeatable_kernels(program: Program) -> None:
    """Make PyTorch, in this process, use kernels with a fixed order of summation.

    cuDNN is off, for all engines of the process, once a program has recurrent layers: PyTorch has
    no switch for a single thread.

    Operators without such a kernel are an error once a program of the process has an attention that
    needs the deterministic mode: its evaluation has none, and must not end that mode. Until then
    (convolutions, pooling) PyTorch warns, naming the operators.
    """
    # cuBLAS reads this at startup; the value equals its default, 8 buffers of 4 MiB.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    strict = _is_strict() or _calls_any(program, _ONLY_IF_STRICT)
    if _calls_any(program, _NOT_BY_CUDNN):
        torch.backends.cudnn.enabled = False
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # By default PyTorch would also fill every fresh tensor with NaN to expose uninitialised reads.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _calls_any(program: Program, names: tuple[str, ...]) -> bool:
    """Whether a stage of a program calls an operator whose name contains one of these."""
    return any(
        name in str(node.target)
        for kind in {stage.kind.digest: stage.kind for stage in program.stages}.values()
        for graph in kind.graphs.values()
        for node in graph.nodes
        for name in names
    )


def _is_strict() -> bool:
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not is_warning
