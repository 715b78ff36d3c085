"""The pictures of `penstock wafer figure`. Each says on it whether its numbers were simulated,
computed in closed form, or published."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer_figures.names import (
        FIGURES as FIGURES,
        draw as draw,
        figure_named as figure_named,
    )

__getattr__ = lazily(__name__, __file__)
