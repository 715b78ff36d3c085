"""Pictures of sweeps over predictions."""

from collections.abc import Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock.pictures import new_figure, save
from penstock.prediction.sweep import Point, Sweep


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
