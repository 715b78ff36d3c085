"""Predictions of a run before it starts: time, memory, traffic and cost, on any machine."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.prediction.advice import Advice, advise
    from penstock.prediction.page import as_json, page
    from penstock.prediction.planned import plan_run, sweep
    from penstock.prediction.predict import Prediction, predict
    from penstock.prediction.timeline import Task, simulate

__all__ = [
    "Advice",
    "Prediction",
    "Task",
    "advise",
    "as_json",
    "page",
    "plan_run",
    "predict",
    "simulate",
    "sweep",
]

__getattr__ = lazily(
    __name__,
    {
        "Advice": "advice",
        "Prediction": "predict",
        "Task": "timeline",
        "advise": "advice",
        "as_json": "page",
        "page": "page",
        "plan_run": "planned",
        "predict": "predict",
        "simulate": "timeline",
        "sweep": "planned",
    },
)
