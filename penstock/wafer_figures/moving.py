"""The first microseconds of a simulated product, moving: states of cores, words on links."""

from pathlib import Path
from typing import Any

import numpy as np

from penstock.pictures import empty_figure
from penstock.wafer import CoreParameters
from penstock.wafer.mesh import MeshTrace, TraceOptions
from penstock.wafer_figures.heat_maps import name_axes
from penstock.wafer_figures.simulated_case import Case

_TRACE = TraceOptions(windows=60, cycles=40)
_PER_SECOND = 8
_DOTS_PER_INCH = 80
_SIZE = (8.0, 4.0)  # inches
_STATES = {"busy": "#4c72b0", "starved": "#e6e6e6", "blocked": "#c44e52"}
_EAST, _SOUTH = 1, 2  # of `MeshTrace.links`


def draw(path: Path, core: CoreParameters) -> None:
    """Write the animation of a forward product as a GIF.

    Args:
        path: of the file.
        core: parameters of the cores.
    """
    case = Case()
    trace = case.simulate("forward", core, _TRACE).trace
    assert trace is not None
    figure = empty_figure(*_SIZE)

    from matplotlib.animation import PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patches import Patch

    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    words = trace.links[:, :, :, [_EAST, _SOUTH]].sum(axis=-1) / (2 * trace.cycles)
    states = left.imshow(_colours(trace, 0))
    links = right.imshow(100 * words[0], vmin=0, vmax=100 * float(words.max()), cmap="viridis")
    left.set_title("cores", fontsize=9)
    right.set_title("links to the east and south, mean of both", fontsize=9)
    for axes in (left, right):
        name_axes(axes, words.shape[1:])
    left.set_ylabel("row of cores")
    figure.colorbar(links, ax=right, label="in use, %", shrink=0.8)
    handles = [Patch(color=colour, label=name) for name, colour in _STATES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    title = figure.suptitle("", fontsize=9)
    writer = PillowWriter(fps=_PER_SECOND)
    with writer.saving(figure, str(path), _DOTS_PER_INCH):
        for window in range(len(trace.states)):
            states.set_data(_colours(trace, window))
            links.set_data(100 * words[window])
            title.set_text(
                f"Simulated ({core.name} cores): forward, {case}\n{_time(trace, window, core)}"
            )
            writer.grab_frame()


def _time(trace: MeshTrace, window: int, core: CoreParameters) -> str:
    begin, end = window * trace.cycles, (window + 1) * trace.cycles
    return f"cycles {begin:,} to {end:,}, {1e6 * end / core.clock_hz:.2f} microseconds"


def _colours(trace: MeshTrace, window: int) -> np.ndarray:
    """Return the colour of each core [rows, columns, 3]: those of its states, mixed by share."""
    shares = trace.states[window]
    total: Any = shares.sum(axis=-1, keepdims=True)
    mixed = shares / np.maximum(total, 1e-9)
    palette = np.array([_rgb(colour) for colour in _STATES.values()])
    return np.clip(mixed @ palette, 0, 1)


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue
