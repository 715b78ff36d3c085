"""Checks that a resumed run has the configuration, data, model and initial values of its start.

Resuming needs none of these checks. They prevent a resume that silently becomes another run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version

import torch

import penstock
from penstock.config import Config, FactoryModel, check_resumable
from penstock.data import TokenDataset
from penstock.errors import ConfigError, DataError
from penstock.models import ModelSource
from penstock.planning import ExecutionPlan, model_sources
from penstock.training.resume_state import ResumeState


@dataclass(frozen=True)
class Architecture:
    """The computation of a model of the user's own code.

    `graph` identifies the computation, if both models have the same `captured_with`.
    """

    class_name: str
    graph: str
    captured_with: str

    @classmethod
    def of(cls, model: ModelSource, layout: ExecutionPlan, precision: str) -> Architecture:
        """Return the architecture of the model for which a step was planned."""
        versions = (
            f"torch {torch.__version__.split('+')[0]}, transformers {version('transformers')}, "
            f"penstock {penstock.__version__}"
        )
        sizes = f"micro-batches of {layout.micro_batch}, {precision}"
        return cls(model.structure.class_name, layout.program.graph_digest, f"{versions}, {sizes}")


def own_architecture(
    config: Config, model: ModelSource, layout: ExecutionPlan, is_given: bool
) -> dict[str, str] | None:
    """Return the record of a model that is given from Python or made by a factory.

    None for other models, which the configuration describes.
    """
    if not is_given and not isinstance(config.model, FactoryModel):
        return None
    return asdict(Architecture.of(model, layout, config.precision))


def require_same_model(
    config: Config,
    recorded: ResumeState,
    now: dict[str, str] | None,
    notice: Callable[[str], None],
) -> None:
    """Refuse a model whose computation differs from that of the trained model.

    **Raises:** `ConfigError`.
    """
    then = recorded.architecture
    if then is None or now is None:
        return  # from an older release, or described by the configuration
    if then["captured_with"] != now["captured_with"]:
        notice(
            f"cannot compare {now['class_name']} with the model of {config.run.dir}: the run's "
            f"model was captured with {then['captured_with']}, this one with {now['captured_with']}"
        )
    elif then["graph"] != now["graph"]:
        other = "another model" if then["class_name"] == now["class_name"] else then["class_name"]
        raise ConfigError(
            f"{config.run.dir} was trained with {other}, which computes something else than "
            f"{now['class_name']} does now (its code, a size or a dropout differs); give the model "
            "that the run was started with, or choose another run.dir"
        )


def require_same_beginning(
    config: Config,
    recorded: ResumeState,
    model: ModelSource,
    dataset: TokenDataset | None,
    *,
    ignore_values: bool,
) -> None:
    """Refuse to resume if the configuration, the data or the initial weights differ.

    `ignore_values` accepts a module with other values, which the run's own weights replace.

    **Raises:** `ConfigError`, `DataError`.
    """
    check_resumable(config, recorded.trajectory)
    run = config.run.dir
    if dataset is not None and recorded.data not in (None, dataset.fingerprint):
        raise DataError(
            f"{run} was trained on another data set than {dataset.path}; set data.path to the data "
            "set that the run was started with, or choose another run.dir"
        )
    weights = model_sources.folder_fingerprint(config, model)
    if None not in (weights, recorded.weights) and weights != recorded.weights:
        raise ConfigError(
            f"{run} was started from other weights than model.hf has now; set model.hf to the "
            "folder that the run was started from (a deleted folder is also accepted), or choose "
            "another run.dir"
        )
    if ignore_values or recorded.values is None:
        return
    if model.values_fingerprint() not in (None, recorded.values):
        raise ConfigError(
            f"{run} was started from other initial values than {model.structure.class_name} has "
            "now. To continue with the weights of the run, pass Trainer(..., "
            "ignore_initial_values=True), or call torch.manual_seed before the module is built, in "
            "every run of the script; to train this module, choose another run.dir"
        )


def require_newest(config: Config, newest: int | None, step: int) -> None:
    """Refuse to train from `step` if another trainer has advanced the run to `newest`."""
    if newest is not None and newest > step:
        raise ConfigError(
            f"{config.run.dir} has been trained to step {newest} by another trainer, this trainer "
            f"is at step {step}; create a new Trainer, which continues from step {newest}"
        )
