"""The pictures of `penstock wafer figure`. Each says on it whether its numbers were simulated,
computed in closed form, or published."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer_figures.names import FIGURES, FigureName, draw, figure_named

__all__ = ["FIGURES", "FigureName", "draw", "figure_named"]

__getattr__ = lazily(__name__, dict.fromkeys(__all__, "names"))
