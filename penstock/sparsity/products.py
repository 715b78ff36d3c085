"""The three products of a sparse weight: forward, gradient of the inputs, gradient of the entries.

A weight `W` `[outputs, inputs]` has a layout (its mask) and values in the order of the store, which
is row after row. Sums are made in float32 and rounded once. Products by the sparse kernels have the
same bits for any number of threads; those of dense tiles have the bits of PyTorch's dense product.
"""

import threading

import torch

from penstock.kernels import sparse_products
from penstock.kernels.sparse_expansion import collect, expand, expand_marked, has_expansion
from penstock.kernels.sparse_products import gather
from penstock.kernels.sparse_vector_product import multiply_vector
from penstock.sparsity.activations import ACTIVATION_TYPES, check_activations, flat
from penstock.sparsity.layout import Rows, SparseLayout
from penstock.sparsity.product_choice import Choice, DenseTiles

_TILES = threading.local()


def forward(
    layout: SparseLayout,
    values: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    choice: Choice | None,
    transposed: bool = False,
) -> torch.Tensor:
    """Return `x W^T + bias`, or `x W + bias` if `transposed`.

    A transposed weight is stored `[inputs, outputs]`; its product is that of `input_gradient`, with
    a bias. One token, as in generation, is multiplied by a kernel of its own, whatever the choice.

    Args:
        layout: the mask.
        values: float32 or bfloat16 `[entries]`, in the order of the store.
        x: of the values' type, `[tokens, inputs]`.
        bias: `[outputs]`.
        choice: how the product is computed; None only for one token.
        transposed: whether the weight has a row per input instead of a row per output.

    Returns:
        `[tokens, outputs]`.

    Raises:
        ValueError: a tensor has another type or shape, or several tokens have no choice.
    """
    outputs, inputs = reversed(layout.shape) if transposed else layout.shape
    _check(layout, values, x, inputs, "x")
    _check_bias(bias, outputs)
    if x.shape[0] == 1:
        return _multiply_token(layout, values, x, bias, transposed=transposed)
    if choice is None:
        raise ValueError(
            f"choice: expected one for {x.shape[0]} tokens, got None; give that of choose_product "
            "(only one token needs none)"
        )
    return _multiply(layout, values, x, bias, choice, transposed=transposed)


def input_gradient(
    layout: SparseLayout, values: torch.Tensor, dy: torch.Tensor, *, choice: Choice
) -> torch.Tensor:
    """Return `dy W`, the gradient of the inputs.

    Args:
        dy: the gradient of the outputs, of the values' type, `[tokens, outputs]`.

    Returns:
        `[tokens, inputs]`.

    Raises:
        ValueError: a tensor has another type or shape.
    """
    _check(layout, values, dy, layout.shape[0], "dy")
    return _multiply(layout, values, dy, None, choice, transposed=True)


def to_dense(layout: SparseLayout, values: torch.Tensor) -> torch.Tensor:
    """Return the weight `[outputs, inputs]` of the values' type, 0 where the mask keeps nothing.

    Raises:
        ValueError: the values are not those of the mask.
    """
    if values.dtype not in ACTIVATION_TYPES or values.shape != (layout.entries,):
        raise ValueError(
            f"values: expected float32 or bfloat16 [{layout.entries}], one per entry of the mask, "
            f"got {values.dtype} {list(values.shape)}"
        )
    dense = torch.empty(layout.shape, dtype=values.dtype)
    _expand_rows(layout, values, range(layout.shape[0]), dense)
    return dense


def entries_of(layout: SparseLayout, dense: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor `[outputs, inputs]` at the entries of the mask.

    Returns:
        float32 `[entries]`, in the order of the store.

    Raises:
        ValueError: the tensor has another type or shape.
    """
    if dense.dtype not in ACTIVATION_TYPES or dense.shape != layout.shape:
        raise ValueError(
            f"dense tensor: expected float32 or bfloat16 {list(layout.shape)}, got {dense.dtype} "
            f"{list(dense.shape)}"
        )
    kept = torch.empty(layout.entries, dtype=torch.float32)
    rows = layout.rows
    outputs, inputs = layout.shape
    collect(rows.starts, rows.columns, inputs, range(outputs), flat(dense), flat(kept))
    return kept


def weight_gradient(
    layout: SparseLayout,
    x: torch.Tensor,
    dy: torch.Tensor,
    *,
    choice: Choice,
) -> torch.Tensor:
    """Return the gradient of the entries of the mask: `dy^T x` at their places.

    An expanded product rounds the gradient to the type of the activations, as a dense one does.

    Args:
        x: `[tokens, inputs]`.
        dy: of the same type and tokens, `[tokens, outputs]`.

    Returns:
        float32 `[entries]`, in the order of the store.

    Raises:
        ValueError: a tensor has another type or shape.
    """
    _check_activations(x, layout.shape[1], "x")
    _check_activations(dy, layout.shape[0], "dy")
    if x.dtype != dy.dtype or x.shape[0] != dy.shape[0]:
        raise ValueError(
            f"dy: expected {x.dtype} of {x.shape[0]} tokens, as x has, "
            f"got {dy.dtype} of {dy.shape[0]}"
        )
    product = choice.weight_gradient
    if isinstance(product, DenseTiles):
        return _gradient_from_tiles(layout.rows, x.detach(), dy.detach(), product.band_rows)
    gradient = sparse_products.entry_gradient(
        layout.blocked(product.block_columns, product.band_rows),
        flat(x),
        flat(dy),
        panel_tokens=product.panel_tokens,
        bfloat16=product.bfloat16,
    )
    return torch.from_numpy(gradient)


def _multiply(
    layout: SparseLayout,
    values: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    choice: Choice,
    *,
    transposed: bool,
) -> torch.Tensor:
    product = choice.input_gradient if transposed else choice.forward
    if isinstance(product, DenseTiles):
        return _multiply_tiles(
            layout, values, x.detach(), bias, product.band_rows, transposed=transposed
        )
    matrix = layout.blocked(product.block_columns, product.band_rows, transposed=transposed)
    out = torch.empty(x.shape[0], matrix.shape[0], dtype=x.dtype)
    sparse_products.multiply(
        matrix,
        gather(flat(values), matrix.positions, product.bfloat16),
        flat(x),
        flat(out),
        panel_tokens=product.panel_tokens,
        bias=None if bias is None else flat(bias.float()),
        bfloat16=product.bfloat16,
    )
    return out


def _multiply_tiles(
    layout: SparseLayout,
    values: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    band_rows: int,
    *,
    transposed: bool,
) -> torch.Tensor:
    """Expand one band of rows after the other into one tile and multiply by it.

    A weight in a single band is expanded in the order of the store, also for the gradient of the
    inputs, whose bands are of columns otherwise: sums are not made of rounded parts.
    """
    outputs, inputs = reversed(layout.shape) if transposed else layout.shape
    y = x.new_empty(x.shape[0], outputs)
    bias = None if bias is None else bias.to(x.dtype)
    if transposed and band_rows >= outputs:
        memory = _tile_memory(inputs * outputs, x.dtype)
        _expand_rows(layout, values, range(inputs), memory)
        weight = memory.view(inputs, outputs)
        if bias is None:
            return torch.mm(x, weight, out=y)
        return torch.addmm(bias, x, weight, out=y)
    memory = _tile_memory(min(band_rows, outputs) * inputs, x.dtype)
    for band in _bands(outputs, band_rows):
        tile = memory[: len(band) * inputs]
        if transposed:
            _expand(layout.transposed_rows, values, band, tile)
        else:
            _expand_rows(layout, values, band, tile)
        weight, part = tile.view(len(band), inputs).t(), slice(band.start, band.stop)
        if bias is None:
            torch.mm(x, weight, out=y[:, part])
        else:
            torch.addmm(bias[part], x, weight, out=y[:, part])
    return y


def _tile_memory(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a tile, the same for all products of a thread.

    The system clears the pages of new memory; reused memory is written once.
    """
    held: torch.Tensor | None = getattr(_TILES, "memory", None)
    if held is None or held.numel() < count * dtype.itemsize:
        held = _TILES.memory = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
    return held[: count * dtype.itemsize].view(dtype)


def _expand_rows(
    layout: SparseLayout, values: torch.Tensor, band: range, tile: torch.Tensor
) -> None:
    if has_expansion():
        rows, width = layout.rows, layout.shape[1]
        expand_marked(
            rows.starts, rows.columns, layout.bitmap, flat(values), width, band, flat(tile)
        )
    else:
        _expand(layout.rows, values, band, tile)


def _expand(rows: Rows, values: torch.Tensor, band: range, tile: torch.Tensor) -> None:
    _, width = rows.shape
    expand(rows.starts, rows.columns, flat(values), rows.positions, width, band, flat(tile))


def _gradient_from_tiles(
    rows: Rows, x: torch.Tensor, dy: torch.Tensor, band_rows: int
) -> torch.Tensor:
    """Make the dense gradient band after band in one tile; keep what the mask keeps."""
    outputs, inputs = rows.shape
    kept = torch.empty(rows.columns.size, dtype=torch.float32)
    memory = _tile_memory(min(band_rows, outputs) * inputs, x.dtype)
    for band in _bands(outputs, band_rows):
        tile = memory[: len(band) * inputs]
        torch.mm(dy[:, band.start : band.stop].t(), x, out=tile.view(len(band), inputs))
        collect(rows.starts, rows.columns, inputs, band, flat(tile), flat(kept))
    return kept


def _multiply_token(
    layout: SparseLayout,
    values: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    transposed: bool,
) -> torch.Tensor:
    rows = layout.rows
    y = multiply_vector(
        rows.starts,
        rows.columns,
        flat(values),
        rows.shape[1],
        flat(x.float()),
        None if bias is None else flat(bias.float()),
        transposed=transposed,
    )
    return torch.from_numpy(y).to(x.dtype).unsqueeze(0)


def _bands(rows: int, band_rows: int) -> list[range]:
    if band_rows < 1:
        raise ValueError(f"band_rows: expected at least 1, got {band_rows}")
    return [range(low, min(low + band_rows, rows)) for low in range(0, rows, band_rows)]


def _check(
    layout: SparseLayout,
    values: torch.Tensor,
    x: torch.Tensor,
    features: int,
    name: str,
) -> None:
    _check_activations(x, features, name)
    if values.dtype != x.dtype or values.shape != (layout.entries,):
        raise ValueError(
            f"values: expected {x.dtype} [{layout.entries}], of the type of {name} and one per "
            f"entry of the mask, got {values.dtype} {list(values.shape)}"
        )


def _check_bias(bias: torch.Tensor | None, outputs: int) -> None:
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(
            f"bias: expected shape [{outputs}], one number per output, got {list(bias.shape)}"
        )


def _check_activations(x: torch.Tensor, features: int, name: str) -> None:
    check_activations(name, x)
    if x.shape[1] != features:
        raise ValueError(f"{name}: expected {features} features, got {x.shape[1]}")
