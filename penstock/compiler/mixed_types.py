"""Types of operands in bf16 programs: weights are bfloat16, inputs and buffers float32.

The rules are those of `torch.autocast` on a CPU: products run in bfloat16; losses, and functions
without kernels in bfloat16, run in float32. A write in place has the type of the written tensor.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.compiler.tensors import tensors_in


def _named(names: Iterable[str], *owners: Any) -> set[Callable[..., Any]]:
    """Return the functions of these names in each owner that has them."""
    names = tuple(names)
    return {getattr(owner, n) for owner in owners for n in names if hasattr(owner, n)}


# Products and normalisations that require all their floating operands in one type.
_ONE_TYPE = {
    *_named(
        (
            *("linear", "bilinear", "embedding_bag", "prelu", "layer_norm", "group_norm"),
            *("conv1d", "conv2d", "conv3d", "conv_tbc"),
            *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
            *("multi_head_attention_forward", "scaled_dot_product_attention"),
        ),
        F,
        torch,
    ),
    *_named(
        (
            *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv"),
            *("dot", "vdot", "inner", "vecdot", "tensordot", "einsum", "chain_matmul", "multi_dot"),
            *("addmm", "addbmm", "baddbmm", "addmv"),
            *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        ),
        torch,
        torch.linalg,
        torch.Tensor,
    ),
}
# PyTorch has no kernels in bfloat16 for these; those of `matrix_exp` overflow.
_LINEAR_ALGEBRA = (
    *("cholesky", "cholesky_ex", "cholesky_inverse", "cholesky_solve"),
    *("det", "logdet", "slogdet", "matrix_exp", "matrix_power", "cond", "matrix_rank"),
    *("inv", "inv_ex", "inverse", "pinv", "pinverse", "tensorinv", "vander"),
    *("matrix_norm", "nuclear_norm"),
    *("eig", "eigh", "eigvals", "eigvalsh", "svd", "svdvals"),
    *("qr", "geqrf", "orgqr", "ormqr", "householder_product"),
    *("lu", "lu_factor", "lu_factor_ex", "lu_solve", "ldl_factor", "ldl_factor_ex", "ldl_solve"),
    *("solve", "solve_ex", "solve_triangular", "triangular_solve", "tensorsolve", "lstsq"),
)
_FOURIER = (
    *(f"{kind}{size}" for kind in ("fft", "ifft", "rfft", "irfft") for size in ("", "2", "n")),
    *(f"{kind}{size}" for kind in ("hfft", "ihfft") for size in ("", "2", "n")),
)
_SPECIAL = (
    *("erfcx", "i1", "i1e", "log_ndtr", "ndtri", "zeta"),
    *(
        name
        for name in dir(torch.special)
        if any(family in name for family in ("airy", "bessel", "polynomial"))
    ),
)
_OTHERS = ("cdist", "polar", "complex", "quantile", "nanquantile", "stft", "istft", "histogram")
_POOLS = ("avg_pool3d", "lp_pool3d", "local_response_norm", "pdist")
# Losses have few elements, and all are averaged.
_LOSSES = (
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "nll_loss"),
    *("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss"),
    *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
    *("triplet_margin_loss", "gaussian_nll_loss", "poisson_nll_loss", "ctc_loss", "kl_div"),
    *("huber_loss", "l1_loss", "mse_loss", "smooth_l1_loss"),
)
_IN_FLOAT32 = {
    *_named((*_LINEAR_ALGEBRA, *_OTHERS), torch.linalg, torch, torch.Tensor),
    *_named(_FOURIER, torch.fft),
    *_named(_SPECIAL, torch.special),
    *_named((*_POOLS, *_LOSSES), F),
    torch.view_as_complex,
    torch.pdist,
}
_SCATTERS = (
    *("index_add", "index_copy", "index_put", "index_reduce", "put", "masked_scatter"),
    *("scatter", "scatter_add", "scatter_reduce"),
)
# Their running statistics and positions are float32, and would be less exact in bfloat16; the end
# of an interpolation may be a float32 target.
_IN_WIDEST = {
    *_named(("batch_norm", "instance_norm", "grid_sample"), F, torch),
    *_named((*_SCATTERS, "lerp", "cross", "isclose"), torch, torch.linalg, torch.Tensor),
}
# In the type of the tensor that they write.
_IN_PLACE = _named(
    (
        *("__setitem__", "lerp_", *(f"{name}_" for name in _SCATTERS)),
        *("addmm_", "addbmm_", "baddbmm_", "addmv_"),
    ),
    torch.Tensor,
)
# In float32 for some values of their options only.
_NORMS = {torch.norm, torch.Tensor.norm, torch.linalg.norm}


class MixedTypes(TorchFunctionMode):
    """Runs products of mixed operands in bfloat16, and losses and functions without kernels in
    bfloat16 in float32.

    The mode does not see the calls within a function that it sees, such as those of
    `multi_head_attention_forward`.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ONE_TYPE or func in _IN_WIDEST:
            floats = {t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()}
            if floats == {torch.float32, torch.bfloat16}:
                cast = _lower if func in _ONE_TYPE else _raise
                args = tuple(map(cast, args))
                kwargs = {name: cast(value) for name, value in kwargs.items()}
        elif func in _IN_PLACE and args[0].dtype in (torch.float32, torch.bfloat16):
            cast = _raise if args[0].dtype == torch.float32 else _lower
            args = tuple(map(cast, args))
            kwargs = {name: cast(value) for name, value in kwargs.items()}
        elif func in _IN_FLOAT32 or _has_no_kernel(func, args, kwargs):
            args = tuple(map(_raise, args))
            kwargs = {name: _raise(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def lowered_arguments(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a module's arguments in bfloat16; a hook that runs before its forward."""
    return tuple(map(_lower, args))


def _has_no_kernel(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether these options of a function have no kernel in bfloat16."""
    if func is F.interpolate:
        return bool(kwargs.get("antialias"))
    if func in _NORMS:  # singular values
        order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else None))
        return order == "nuc" or (func is torch.linalg.norm and order in (2, -2))
    return False


def _lower(value: Any) -> Any:
    return _cast(value, torch.float32, torch.bfloat16)


def _raise(value: Any) -> Any:
    return _cast(value, torch.bfloat16, torch.float32)


def _cast(value: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    """Return an argument with its tensors of the type `given` in the type `wanted`."""
    if isinstance(value, torch.Tensor):
        return value.to(wanted) if value.dtype == given else value
    if type(value) in (list, tuple):
        return type(value)(_cast(item, given, wanted) for item in value)
    return value
