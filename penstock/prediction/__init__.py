"""Predictions of a run before it starts: time, memory, traffic and cost, on any machine."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.prediction.advice import Advice, advise
    from penstock.prediction.comparison import predicted_step
    from penstock.prediction.figures import draw_gpus, draw_memory, draw_scaling, draw_timing
    from penstock.prediction.gpu_cluster import Degrees, Division, ModelFigures, divide
    from penstock.prediction.gpu_run import GpuRun, describe
    from penstock.prediction.parallel_search import best_division, fewest_gpus
    from penstock.prediction.planned import Planner
    from penstock.prediction.plots import plot_sweep
    from penstock.prediction.predicted_run import Prediction, predict
    from penstock.prediction.printed_page import as_json, page
    from penstock.prediction.sweep import (
        Point,
        Sweep,
        as_csv,
        fewest_engines,
        parse_deadline,
        row,
        run_sweep,
    )
    from penstock.prediction.timeline import Task, simulate

__all__ = [
    "Advice",
    "Degrees",
    "Division",
    "GpuRun",
    "ModelFigures",
    "Planner",
    "Point",
    "Prediction",
    "Sweep",
    "Task",
    "advise",
    "as_csv",
    "as_json",
    "best_division",
    "describe",
    "divide",
    "draw_gpus",
    "draw_memory",
    "draw_scaling",
    "draw_timing",
    "fewest_engines",
    "fewest_gpus",
    "page",
    "parse_deadline",
    "plot_sweep",
    "predict",
    "predicted_step",
    "row",
    "run_sweep",
    "simulate",
]

__getattr__ = lazily(
    __name__,
    {
        "Advice": "advice",
        "Degrees": "gpu_cluster",
        "Division": "gpu_cluster",
        "GpuRun": "gpu_run",
        "describe": "gpu_run",
        "ModelFigures": "gpu_cluster",
        "best_division": "parallel_search",
        "divide": "gpu_cluster",
        "draw_gpus": "figures",
        "draw_memory": "figures",
        "draw_scaling": "figures",
        "draw_timing": "figures",
        "fewest_gpus": "parallel_search",
        "Prediction": "predicted_run",
        "Task": "timeline",
        "advise": "advice",
        "as_json": "printed_page",
        "page": "printed_page",
        "Planner": "planned",
        "Point": "sweep",
        "Sweep": "sweep",
        "as_csv": "sweep",
        "fewest_engines": "sweep",
        "parse_deadline": "sweep",
        "plot_sweep": "plots",
        "predict": "predicted_run",
        "predicted_step": "comparison",
        "row": "sweep",
        "run_sweep": "sweep",
        "simulate": "timeline",
    },
)
