"""Predictions of time, memory and cost before a run."""

from penstock.prediction.gpu_cluster import Degrees, Division, ModelFigures, divide
from penstock.prediction.parallel_search import best_division, fewest_gpus

__all__ = ["Degrees", "Division", "ModelFigures", "best_division", "divide", "fewest_gpus"]
