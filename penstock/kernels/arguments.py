"""Argument checks of every kernel: compiled code performs no bounds checks."""

import numpy as np


def require_flat(
    name: str, array: np.ndarray, length: int, *dtypes: type[np.generic], write: bool = False
) -> None:
    """Reject an array that is not one-dimensional, contiguous, of this length and of a known type.

    Raises:
        ValueError: naming the array, the expected and the actual value.
    """
    if array.dtype not in dtypes:
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise ValueError(f"{name}: expected {wanted}, got {array.dtype.name}")
    if array.shape != (length,):
        raise ValueError(f"{name}: expected shape [{length}], got {list(array.shape)}")
    _require_contiguous(name, array, write)


def require_rows(
    name: str, array: np.ndarray, dtype: type[np.generic], write: bool = False
) -> None:
    """Reject an array that is not two-dimensional and of type `dtype`, with contiguous rows, which
    may be padded.

    Raises:
        ValueError: naming the array, the expected and the actual value.
    """
    if array.dtype != dtype or array.ndim != 2:
        raise ValueError(
            f"{name}: expected {np.dtype(dtype).name} in two dimensions, "
            f"got {array.dtype.name} of shape {list(array.shape)}"
        )
    rows, columns = array.shape
    stride, size = array.strides[0], array.itemsize
    is_padded = rows > 1 and stride >= columns * size and stride % size == 0
    _require_contiguous(name, array[0] if is_padded else array, write)


def flat_rows(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the memory of an array's rows, flat, and the elements from one row to the next; the
    array has passed `require_rows`."""
    rows, columns = array.shape
    if rows < 2:
        return array.reshape(-1), columns
    stride = array.strides[0] // array.itemsize
    size = (rows - 1) * stride + columns
    return np.lib.stride_tricks.as_strided(array, (size,), (array.itemsize,)), stride


def _require_contiguous(name: str, array: np.ndarray, write: bool) -> None:
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"{name}: expected contiguous, aligned memory; pass a contiguous copy")
    if write and not array.flags.writeable:
        raise ValueError(f"{name}: expected memory that can be written, got a read-only array")
