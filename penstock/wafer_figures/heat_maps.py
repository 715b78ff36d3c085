"""Panels of heat maps side by side, a cell for each core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.pictures import empty_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH, _ROW_HEIGHT = 9.0, 2.9  # inches


def draw_shares(
    path: Path,
    title: str,
    label: str,
    rows: Mapping[str, Mapping[str, np.ndarray]],
    *,
    from_zero: bool = False,
) -> None:
    """Draw shares, 0 to 1, of several kinds for each core; panels above each other have one scale.

    Args:
        path: of the picture.
        title: of the whole.
        label: of the scales.
        rows: rows of panels by name; in each, arrays [rows, columns] by title.
        from_zero: whether scales begin at 0, and not at the least value.
    """
    most = max(len(panels) for panels in rows.values())
    figure = empty_figure(_WIDTH, 0.5 + _ROW_HEIGHT * len(rows))
    grid = figure.subplots(len(rows), most, squeeze=False)
    scales = [
        _scale(column, from_zero) for column in zip(*map(_values, rows.values()), strict=True)
    ]
    for line, (name, panels) in zip(grid, rows.items(), strict=True):
        for axes, scale, (title_of, values) in zip(line, scales, panels.items(), strict=True):
            low, high = scale
            image = axes.imshow(100 * values, vmin=low, vmax=high, cmap="viridis")
            axes.set_title(f"{title_of}: {100 * values.mean():.1f} %", fontsize=9)
            name_axes(axes, values.shape)
            figure.colorbar(image, ax=axes, shrink=0.8)
        line[0].set_ylabel(f"{name}\nrow of cores", fontsize=9)
    figure.suptitle(f"{title}\n{label}", fontsize=10)
    save(figure, path)


def _values(panels: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return list(panels.values())


def _scale(panels: Sequence[np.ndarray], from_zero: bool) -> tuple[float, float]:
    """Return the limits of the scale of some panels, in percent."""
    low = 0.0 if from_zero else 100 * min(float(values.min()) for values in panels)
    high = 100 * max(float(values.max()) for values in panels)
    return low, max(high, low + 1)


def name_axes(axes: Axes, shape: tuple[int, ...]) -> None:
    """Number some of the rows and columns of cores, from 0."""
    rows, columns = shape[:2]
    axes.set_xlabel("column of cores", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.set_xticks(_places(columns))
    axes.set_yticks(_places(rows))


def _places(count: int) -> list[int]:
    step = max(1, count // 4)
    return [*range(0, count - step // 2, step), count - 1]
