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
    """Reject an array that is not two-dimensional, row-contiguous and of type `dtype`.

    Raises:
        ValueError: naming the array, the expected and the actual value.
    """
    if array.dtype != dtype or array.ndim != 2:
        raise ValueError(
            f"{name}: expected {np.dtype(dtype).name} in two dimensions, "
            f"got {array.dtype.name} of shape {list(array.shape)}"
        )
    _require_contiguous(name, array, write)


def _require_contiguous(name: str, array: np.ndarray, write: bool) -> None:
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"{name}: expected contiguous, aligned memory; pass a contiguous copy")
    if write and not array.flags.writeable:
        raise ValueError(f"{name}: expected memory that can be written, got a read-only array")
