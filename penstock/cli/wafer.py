"""`penstock wafer`: cycles of products, of a program's stages, and pictures of a wafer."""

import typer

from penstock.cli.wafer_figure import figure
from penstock.cli.wafer_layers import layers
from penstock.cli.wafer_product import product

app = typer.Typer(
    help="Cycles on a simulated wafer-scale engine, and pictures of them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("product", short_help="Cycles of one layer's products, by term.")(product)
app.command("layers", short_help="Cycles of each kind of stage of a model.")(layers)
app.command("figure", short_help="Draw a picture.")(figure)
