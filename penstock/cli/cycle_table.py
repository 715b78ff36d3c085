"""Columns of tables with the cycles of stages, forward and backward."""

from collections.abc import Mapping

NAME_WIDTH = 24
HEADINGS = f"{'forward':>14}{'backward':>14}"


def name_column(name: str) -> str:
    """Return the column of a stage's name: its end, if it is too long."""
    most = NAME_WIDTH - 1
    return (name if len(name) <= most else f"..{name[-(most - 2) :]}").ljust(NAME_WIDTH)


def cycle_columns(sweeps: Mapping[str, float]) -> str:
    """Return the columns below `HEADINGS` of a stage's cycles by sweep; the last stage has one
    number, that of `turn`, for both."""
    if "turn" in sweeps:
        return f"{sweeps['turn']:,.0f} for both".rjust(len(HEADINGS))
    return "".join(
        (f"{sweeps[sweep]:,.0f}" if sweep in sweeps else "-").rjust(14)
        for sweep in ("forward", "backward")
    )
