"""Encodes open selections, histograms and changes of masks as payloads of messages."""

import json
import struct
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from penstock.errors import PenstockError, ProtocolError
from penstock.sparsity import Histogram, MaskChange, Order, Selection
from penstock.store import Decision, OpenSelection

_COUNT = struct.Struct("<I")
MOST_HISTOGRAM_BYTES = _COUNT.size + (1 << 16) * (2 + 8)  # a digit of 16 bits, and its count
_MOST = 1 << 64


def bytes_of_open_selections(selections: Sequence[OpenSelection]) -> np.ndarray:
    """Return the payload of a request for histograms."""
    return _dump([[s.weight, s.side, _plain(s.selection)] for s in selections])


def open_selections_of(payload: np.ndarray | None) -> list[OpenSelection]:
    """Return the open selections in a payload.

    **Raises:** `ProtocolError` if it has no valid ones.
    """
    try:
        entries = _load(payload)
        if not isinstance(entries, list):
            raise TypeError(f"expected a list, got {str(entries)[:40]!r}")
        return [_open_selection(*entry) for entry in entries]
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise _invalid("open selections", error) from None


def bytes_of_histograms(histograms: Sequence[Histogram]) -> np.ndarray:
    """Return the payload of a shard's histograms: of each its number of bins, digits and counts."""
    parts = []
    for each in histograms:
        parts.append(_COUNT.pack(each.digits.size))
        parts.append(each.digits.astype("<u2").tobytes())
        parts.append(each.counts.astype("<i8").tobytes())
    return np.frombuffer(b"".join(parts), np.uint8)


def histograms_of(payload: np.ndarray | None, elements: Sequence[int]) -> list[Histogram]:
    """Return the histograms in a payload.

    **Arguments:** `elements` are the most entries that each histogram may count.

    **Raises:** `ProtocolError` if it has no valid ones.
    """
    most = MOST_HISTOGRAM_BYTES * len(elements)
    if payload is not None and payload.nbytes > most:
        error = ValueError(f"{payload.nbytes:,} bytes, expected at most {most:,}")
        raise _invalid("histograms", error)
    data = b"" if payload is None else payload.tobytes()
    found, at = [], 0
    try:
        for largest in elements:
            (size,) = _COUNT.unpack_from(data, at)
            digits = np.frombuffer(data, "<u2", size, at + _COUNT.size)
            counts = np.frombuffer(data, "<i8", size, at + _COUNT.size + digits.nbytes)
            at += _COUNT.size + digits.nbytes + counts.nbytes
            if (np.diff(digits.astype(np.int64)) <= 0).any() or (counts <= 0).any():
                raise ValueError("digits do not rise, or a count is not above 0")
            # A sum of at most 2^16 counts, none above `largest`, does not exceed 64 bits.
            if (counts > largest).any() or counts.sum(dtype=np.int64) > largest:
                raise ValueError(f"it counts more than the {largest:,} elements of the weight")
            found.append(Histogram(digits.astype(np.uint16), counts.astype(np.int64)))
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes follow the last histogram")
    except (struct.error, ValueError) as error:
        raise _invalid("histograms", error) from None
    return found


def bytes_of_masks(decision: Decision) -> np.ndarray | None:
    """Return the payload with the changes of masks of a decision; None if there are none."""
    if not decision.masks:
        return None
    changes = [[c.weight, c.kept, _plain(c.drop), _plain(c.grow)] for c in decision.masks]
    return _dump({"replaces_update": decision.replaces_update, "changes": changes})


def masks_of_payload(payload: np.ndarray | None) -> tuple[tuple[MaskChange, ...], bool]:
    """Return the changes of masks in a payload, and whether they replace the update.

    **Raises:** `ProtocolError` if it has no valid ones.
    """
    if payload is None:
        return (), False
    try:
        body = _load(payload)
        changes = tuple(
            MaskChange(_text(weight), _whole(kept), _selection(drop), _selection(grow))
            for weight, kept, drop, grow in body["changes"]
        )
        return changes, bool(body["replaces_update"])
    except (TypeError, ValueError, KeyError, RecursionError, PenstockError) as error:
        raise _invalid("changes of masks", error) from None


def _plain(selection: Selection) -> list[Any]:
    return [selection.order.value, *astuple(selection)[1:]]


def _selection(plain: Any) -> Selection:
    order, *numbers, is_decided = plain
    key, count, remaining, digits, value, key_bits = map(_whole, numbers)
    decided = bool(is_decided)
    return Selection(Order(order), key, count, remaining, digits, value, key_bits, decided)


def _open_selection(weight: Any, side: Any, selection: Any) -> OpenSelection:
    if side not in ("drop", "grow"):
        raise ValueError(f"{str(side)[:20]!r} is neither drop nor grow")
    found = _selection(selection)
    if found.is_decided:
        raise ValueError("the selection is decided")
    return OpenSelection(_text(weight), side, found)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"expected an integer from 0 to 2^64 - 1, got {str(value)[:40]!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a name, got {str(value)[:40]!r}")
    return value


def _dump(plain: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(plain).encode(), np.uint8)


def _load(payload: np.ndarray | None) -> Any:
    return json.loads(b"" if payload is None else payload.tobytes())


def _invalid(expected: str, error: Exception) -> ProtocolError:
    return ProtocolError(
        f"expected {expected}, got invalid bytes ({type(error).__name__}: {error}); do all nodes "
        "run the same version of Penstock?"
    )
