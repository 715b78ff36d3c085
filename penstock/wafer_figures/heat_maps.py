"""Panels of heat maps side by side, a cell for each core."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.pictures import empty_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (9.0, 3.4)  # inches


def draw_shares(path: Path, title: str, label: str, panels: Mapping[str, np.ndarray]) -> None:
    """Draw shares, 0 to 1, of several kinds for each core, with one scale.

    Args:
        path: of the picture.
        title: of the whole.
        label: of the scale.
        panels: arrays [rows, columns], by title.
    """
    figure = empty_figure(*_SIZE)
    all_axes = figure.subplots(1, len(panels), sharey=True)
    most = max(0.01, max(float(values.max()) for values in panels.values()))
    for axes, (name, values) in zip(all_axes, panels.items(), strict=True):
        image = axes.imshow(100 * values, vmin=0, vmax=100 * most, cmap="viridis")
        axes.set_title(f"{name}: {100 * values.mean():.1f} % on average", fontsize=9)
        name_axes(axes, values.shape)
    all_axes[0].set_ylabel("row of cores")
    figure.colorbar(image, ax=list(all_axes), label=label, shrink=0.85)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def name_axes(axes: Axes, shape: tuple[int, ...]) -> None:
    """Number some of the rows and columns of cores, from 0."""
    rows, columns = shape[:2]
    axes.set_xlabel("column of cores")
    axes.set_xticks(_places(columns))
    axes.set_yticks(_places(rows))


def _places(count: int) -> list[int]:
    step = max(1, count // 4)
    return [*range(0, count - step // 2, step), count - 1]
