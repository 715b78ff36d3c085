"""Predictions of a run before it starts: time, memory, traffic and cost, on any machine."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.prediction.advice import Advice as Advice
    from penstock.prediction.comparison import predicted_step as predicted_step
    from penstock.prediction.figures import (
        draw_gpus as draw_gpus,
        draw_memory as draw_memory,
        draw_scaling as draw_scaling,
        draw_timing as draw_timing,
    )
    from penstock.prediction.gpu_cluster import (
        Degrees as Degrees,
        Division as Division,
        ModelFigures as ModelFigures,
        divide as divide,
    )
    from penstock.prediction.gpu_run import GpuRun as GpuRun
    from penstock.prediction.parallel_search import (
        best_division as best_division,
        fewest_gpus as fewest_gpus,
    )
    from penstock.prediction.planned import Planner as Planner
    from penstock.prediction.planned_length import most_tokens as most_tokens
    from penstock.prediction.plots import plot_sweep as plot_sweep
    from penstock.prediction.predicted_run import Prediction as Prediction, predict as predict
    from penstock.prediction.printed_page import as_json as as_json, page as page
    from penstock.prediction.sweep import (
        Point as Point,
        Sweep as Sweep,
        as_csv as as_csv,
        fewest_engines as fewest_engines,
        parse_deadline as parse_deadline,
        row as row,
        run_sweep as run_sweep,
    )

__getattr__ = lazily(__name__, __file__)
