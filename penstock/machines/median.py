"""One description of a machine from several measurements of it."""

import statistics
from collections.abc import Sequence
from typing import Any

from penstock.machines.description import MachineDescription
from penstock.machines.rates import RateCurve

FLASH_DEVICE = "store.flash.device"
"""The entry of a measured machine's sources that names the device of the disk."""

_FLASH = ("store", "flash")
_CURVES = (("engine",), ("store",), _FLASH, ("processes",))
_FIGURES = (
    ("engine", "operator_seconds"),
    ("engine", "stage_seconds"),
    ("engine", "float32_in_step"),
    ("engine", "bfloat16_in_step"),
    (*_FLASH, "both"),
    ("processes", "both"),
    ("processes", "seconds"),
    ("processes", "at_once"),
)


def median_machine(measured: Sequence[MachineDescription]) -> MachineDescription:
    """Return the last of several measurements of one machine, with the median of each figure.

    A shared machine is faster in some minutes than in others; the median of measurements that lie
    apart is nearer to what a run finds than the last one. A curve with other sizes than those of
    the last measurement, and a part that it lacks, do not count; figures of a disk count only if
    `of_last_disk` says so. The spread of a curve is that of
    its points within a measurement or between them, whichever is larger.
    """
    last = measured[-1].model_dump()
    all_of = [machine.model_dump() for machine in measured]
    on_disk = [machine.model_dump() for machine in of_last_disk(measured)]
    for path in _CURVES:
        part = _at(last, path)
        if part is not None:
            counted = on_disk if path == _FLASH else all_of
            parts = [other for one in counted if (other := _at(one, path)) is not None]
            part["rates"] = [_median_curve(curve, parts) for curve in part["rates"]]
    for *keys, figure in _FIGURES:
        part = _at(last, keys)
        if part is not None and part[figure] is not None:
            values = [
                value
                for one in (on_disk if tuple(keys) == _FLASH else all_of)
                if (other := _at(one, keys)) and (value := other[figure]) is not None
            ]
            part[figure] = statistics.median(values)
    return MachineDescription.model_validate(last)


def of_last_disk(measured: Sequence[MachineDescription]) -> list[MachineDescription]:
    """Return the measurements of the disk that was measured last, by the device in their sources.

    A measurement without a disk does not count, nor, beside one with a device, one from before
    devices were recorded: its disk may be any, and a rate of another disk does more harm than a
    median of fewer measurements.
    """
    last = measured[-1]
    if last.store.flash is None:
        return []
    device = last.sources.get(FLASH_DEVICE)
    on_it = (one for one in measured if one.sources.get(FLASH_DEVICE) == device)
    return [one for one in on_it if one.store.flash is not None]


def _at(found: Any, path: Sequence[str]) -> Any:
    """Return the part of a description under some keys; None where a part is missing."""
    for key in path:
        found = found[key] if found is not None else None
    return found


def _median_curve(curve: dict[str, Any], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    keys = ("work", "dtype", "layout", "sizes")
    alike = [
        other
        for part in parts
        for other in part["rates"]
        if all(other[key] == curve[key] for key in keys)
    ]
    points = list(zip(*(other["rates"] for other in alike), strict=True))
    rates = [statistics.median(point) for point in points]
    between = max(
        (max(point) - min(point)) / 2 / rate for point, rate in zip(points, rates, strict=True)
    )
    spread = max(between, *(other["spread"] for other in alike))
    found = {**curve, "rates": rates, "spread": round(spread, 3)}
    return RateCurve.model_validate(found).model_dump()
