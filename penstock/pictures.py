"""Pictures by matplotlib (the extra `plot`): the frame and the file that all of them share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, install_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg")
_SIZE = (7.0, 4.2)  # inches
_DOTS_PER_INCH = 150

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3")
"""Colours of lines and bars, in the order in which they are taken."""


def empty_figure(width: float = _SIZE[0], height: float = _SIZE[1]) -> Figure:
    """Return an empty picture of a size in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"pictures need matplotlib, which is not installed; {install_extra('plot')}"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def new_figure() -> tuple[Figure, Axes]:
    """Return an empty picture and its axes; errors as of `empty_figure`."""
    figure = empty_figure()
    return figure, figure.add_subplot()


def save(figure: Figure, *paths: Path) -> None:
    """Write a picture as PNG or SVG, by the ending of each name.

    Raises:
        ConfigError: a name has another ending.
    """
    import matplotlib

    for path in paths:
        check_name(path)
        # The same picture gives the same bytes.
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with matplotlib.rc_context({"svg.hashsalt": "penstock"}):
            figure.savefig(path, dpi=_DOTS_PER_INCH, metadata=metadata)


def check_name(path: Path) -> None:
    """Raise `ConfigError` for a picture whose name has another ending than .png and .svg."""
    require_ending(path, _SUFFIXES)


def require_ending(path: Path, endings: tuple[str, ...]) -> None:
    """Refuse a file name with another ending.

    Raises:
        ConfigError: naming the endings.
    """
    if path.suffix not in endings:
        raise ConfigError(
            f"{path}: expected a name that ends in {' or '.join(endings)}, got {path.suffix!r}"
        )
