"""Pictures of predictions, by matplotlib (`penstock[plot]`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.prediction.sweep import Point, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg")
_SIZE = (7.0, 4.2)  # inches


def new_figure() -> tuple[Figure, Axes]:
    """Return an empty picture and its axes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "pictures need matplotlib, which is not installed; run pip install 'penstock[plot]'"
        ) from None
    figure = Figure(figsize=_SIZE, layout="constrained")
    return figure, figure.add_subplot()


def check_name(path: Path) -> None:
    """Raise `ConfigError` for a picture whose name has another ending than .png and .svg."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"{path}: expected a name that ends in {' or '.join(_SUFFIXES)}, got {path.suffix!r}"
        )


def save(figure: Figure, *paths: Path) -> None:
    """Write a picture as PNG or SVG, by the ending of each name.

    Raises:
        ConfigError: a name has another ending.
    """
    import matplotlib as mpl

    for path in paths:
        check_name(path)
        # The same picture gives the same bytes.
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with mpl.rc_context({"svg.hashsalt": "penstock"}):
            figure.savefig(path, dpi=150, metadata=metadata)


def plot_sweep(sweep: Sweep, points: Sequence[Point], path: Path) -> None:
    """Draw tokens per second over the values of a sweep; numbers on logarithmic axes.

    Raises:
        ConfigError: no value has a prediction, or the picture cannot be made.
    """
    drawn = [(p.value, p.prediction.tokens_per_second) for p in points if p.prediction is not None]
    if not drawn:
        raise ConfigError(f"--plot: no value of {sweep.key} has a prediction to draw")
    figure, axes = new_figure()
    values, speeds = zip(*drawn, strict=True)
    if all(value.isdecimal() for value in values):
        numbers = [int(value) for value in values]
        axes.plot(numbers, speeds, "o-", label="predicted")
        if sweep.key == "engines":
            first = speeds[0] / numbers[0]
            axes.plot(numbers, [first * n for n in numbers], "--", color="gray", label="linear")
            axes.legend()
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(numbers, [f"{n:,}" for n in numbers], minor=False)
        axes.minorticks_off()
    else:
        axes.plot(range(len(values)), speeds, "o-")
        axes.set_xticks(range(len(values)), values)
        axes.set_ylim(bottom=0)
    axes.set_xlabel(sweep.key)
    axes.set_ylabel("tokens per second")
    axes.grid(alpha=0.3)
    save(figure, path)
