"""Number formats for people: bytes, counts, durations, and a line chart one row high.

Sizes and rates are in units of 1024 everywhere: KiB, MiB, GiB, TiB, and MiB/s.
"""

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_YEAR_SECONDS = 365 * 86400


def show_bytes(count: float) -> str:
    """Return a size such as `1.5 GiB`, with three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(count) < 1000 or unit == "PiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{_three(count)} {unit}"
        count /= 1024
    raise AssertionError("unreachable: PiB ends the loop")


def show_rate(bytes_per_second: float) -> str:
    """Return a rate such as `1.50 GiB/s`, in the units of `show_bytes`."""
    return f"{show_bytes(bytes_per_second)}/s"


def show_count(count: float) -> str:
    """Return a count such as `124M`, with three significant digits."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(count) < 1000 or unit == "T":
            return f"{count:.0f}" if not unit and count == int(count) else f"{_three(count)}{unit}"
        count /= 1000
    raise AssertionError("unreachable: T ends the loop")


def show_flops(count: float) -> str:
    """Return a number of floating point operations, such as `1.20 T`."""
    for unit in ("", "K", "M", "G", "T", "P"):
        if abs(count) < 1000 or unit == "P":
            return f"{_three(count)} {unit}".rstrip() if count else "0"
        count /= 1000
    raise AssertionError("unreachable: P ends the loop")


def show_dollars(count: float) -> str:
    """Return an amount such as `1,234`, `12.30` or `under 0.01`."""
    if 0 < count < 0.005:
        return "under 0.01"
    return f"{count:,.0f}" if count >= 99.995 or not count else f"{count:.2f}"


def show_energy(kilowatt_hours: float) -> str:
    """Return an energy such as `1.20 MWh` or `35.0 Wh`, with three significant digits."""
    count = 1000 * kilowatt_hours
    for unit in ("Wh", "kWh", "MWh", "GWh"):
        if abs(count) < 1000 or unit == "GWh":
            return f"{_three(count)} {unit}"
        count /= 1000
    raise AssertionError("unreachable: GWh ends the loop")


def show_sparsity(sparsity: float) -> str:
    """Return the share of absent entries, such as `90.00%`."""
    return f"{sparsity:.2%}"


def show_duration(seconds: float) -> str:
    """Return `1.20 ms`, `12.3 s`, `4 min 05 s`, `3 h 20 min`, `2 d 3 h` or `71 years`."""
    if not math.isfinite(seconds):
        return "unknown"
    if 0 < seconds < 0.0995:
        return f"{_three(1e3 * seconds)} ms" if seconds >= 0.00095 else f"{1e6 * seconds:.0f} us"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    if whole < 2 * _YEAR_SECONDS:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    return f"{whole / _YEAR_SECONDS:,.0f} years"


def show_comparable_durations(seconds: Sequence[float]) -> list[str]:
    """Return durations such as `7.75 ms` and `13.3 ms`, all in the unit that suits the longest.

    One that rounds to nothing in that unit is `<0.01 ms`; nothing itself is `0 ms`.
    """
    unit, size = unit_of_duration(max(seconds))
    return [f"{_three_or_less(each / size)} {unit}" for each in seconds]


def _three_or_less(value: float) -> str:
    if value == 0:
        return "0"
    return "<0.01" if 0 < value < 0.005 else _three(value)


def unit_of_duration(seconds: float) -> tuple[str, float]:
    """Return the unit in which a duration has at most three digits before the point, such as `ms`,
    and its seconds."""
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    return next(
        ((unit, size) for unit, size in units.items() if seconds < 999.5 * size), ("h", 3600.0)
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a row of bars, each the mean of an equal share of the values.

    The bars are scaled from the least to the greatest mean. Non-finite values are left out. With
    fewer values than `width`, each value has one bar.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    bars = min(width, len(finite))
    means = []
    for bar in range(bars):
        part = finite[bar * len(finite) // bars : (bar + 1) * len(finite) // bars]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    span = high - low or 1.0
    top = len(_BARS) - 1
    return "".join(_BARS[round((mean - low) / span * top)] for mean in means)


def _three(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def show_shares(accuracy: float | None, exact_match: float | None) -> str:
    """Return the accuracy metrics of an evaluation, to follow its loss; omit missing metrics."""
    shares = {"accuracy": accuracy, "exact match": exact_match}
    return "".join(f"  {name} {share:.1%}" for name, share in shares.items() if share is not None)


def show_bar(done: float, total: float, width: int) -> tuple[str, str]:
    """Return a bar as its full and its empty part; the bar is full if `done` exceeds `total`."""
    full = round(width * min(max(done / total, 0.0), 1.0)) if total > 0 else 0
    return "━" * full, "─" * (width - full)
