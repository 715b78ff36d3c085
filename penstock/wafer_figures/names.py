"""The names of the pictures, in one table, without importing what draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, did_you_mean
from penstock.pictures import require_ending

if TYPE_CHECKING:
    from penstock.wafer import CoreParameters

PICTURE = (".png", ".svg")


@dataclass(frozen=True)
class FigureName:
    """A picture.

    Attributes:
        about: what it shows, in a few words.
        source: `closed form` or `simulated`.
        module: of this package, with a function `draw(path, core)`.
        endings: of file names, the default first.
    """

    about: str
    source: str
    module: str
    endings: tuple[str, ...] = PICTURE


FIGURES: Mapping[str, FigureName] = {
    "acceleration": FigureName(
        "acceleration over sparsity, several widths, one engine and sixteen",
        "closed form",
        "acceleration",
    ),
    "sorting": FigureName(
        "cycles with and without sorting features by their entries", "closed form", "sorting"
    ),
    "ring": FigureName("partial sums along a chain and a ring", "closed form", "ring"),
    "accumulators": FigureName(
        "cycles over the unsent sums that a core may hold", "closed form", "accumulators"
    ),
    "queues": FigureName("cycles over the depth of routers' queues", "simulated", "queues"),
    "cores": FigureName("busy, starved and blocked cores", "simulated", "cores"),
    "links": FigureName("occupancy of the links", "simulated", "links"),
    "animation": FigureName(
        "the first microseconds of a product, core by core", "simulated", "moving", (".gif",)
    ),
}
"""All pictures by name."""


def figure_named(name: str) -> FigureName:
    """Return a picture by its name.

    Raises:
        ConfigError: there is no such picture.
    """
    if name not in FIGURES:
        raise ConfigError(
            f"expected a figure, one of {', '.join(FIGURES)}, got {name!r}"
            f"{did_you_mean(name, FIGURES)}"
        )
    return FIGURES[name]


def draw(name: str, path: Path, core: CoreParameters) -> None:
    """Draw a picture into a file.

    Raises:
        ConfigError: there is no such picture, or its file name has another ending.
    """
    figure = figure_named(name)
    require_ending(path, figure.endings)
    import_module(f"penstock.wafer_figures.{figure.module}").draw(path, core)
