"""Whether a run goes on with what it was started with: configuration, data, model, initial values.

Nothing here is needed to resume: it is what would otherwise go on as another run, unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import transformers

import penstock
from penstock.config import Config, FactoryModel, check_resumable
from penstock.data import TokenDataset
from penstock.errors import ConfigError, DataError
from penstock.models import ModelSource
from penstock.planning import ExecutionPlan, builders
from penstock.training.resume_state import ResumeState


@dataclass(frozen=True)
class Architecture:
    """What a model of the user's own code computes.

    `graph` tells one computation from another, if both were `captured_with` the same.
    """

    class_name: str
    graph: str
    captured_with: str

    @classmethod
    def of(cls, model: ModelSource, layout: ExecutionPlan, precision: str) -> Architecture:
        """Return that of the model that a step was laid out for."""
        versions = (
            f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, "
            f"penstock {penstock.__version__}"
        )
        sizes = f"micro-batches of {layout.micro_batch}, {precision}"
        return cls(model.class_name, layout.program.graph_digest, f"{versions}, {sizes}")


def own_architecture(
    config: Config, model: ModelSource, layout: ExecutionPlan, is_given: bool
) -> dict[str, str] | None:
    """Return what a run records of a model that is given from Python or made by a factory.

    None of others, which the configuration describes.
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
    """Refuse a model that computes something else than the one that the run has trained.

    **Raises:** `ConfigError`.
    """
    then = recorded.architecture
    if then is None or now is None:
        return  # an older release recorded none, or the configuration says it all
    if then["captured_with"] != now["captured_with"]:
        notice(
            f"whether {now['class_name']} computes what {config.run.dir} was trained on cannot be "
            f"told: that was captured with {then['captured_with']}, this with "
            f"{now['captured_with']}"
        )
    elif then["graph"] != now["graph"]:
        other = "another model" if then["class_name"] == now["class_name"] else then["class_name"]
        raise ConfigError(
            f"{config.run.dir} was trained with {other}, which computes something else than "
            f"{now['class_name']} does now (its code, a size or a dropout differs); give the model "
            "that it was started with, or choose another run.dir"
        )


def require_same_beginning(
    config: Config,
    recorded: ResumeState,
    model: ModelSource,
    dataset: TokenDataset | None,
    *,
    ignore_values: bool,
) -> None:
    """Refuse to train on where the configuration, the data or the initial weights differ.

    `ignore_values` accepts a module with other values: those of the run take their place.

    **Raises:** `ConfigError`, `DataError`.
    """
    check_resumable(config, recorded.trajectory)
    run = config.run.dir
    if dataset is not None and recorded.data not in (None, dataset.fingerprint):
        raise DataError(
            f"{run} was trained on another data set than {dataset.path}; point data.path at the "
            "one it was started with, or choose another run.dir"
        )
    weights = builders.folder_fingerprint(config, model)
    if None not in (weights, recorded.weights) and weights != recorded.weights:
        raise ConfigError(
            f"{run} was started from other weights than are in model.hf now; point model.hf at "
            "those it was started from (they may also be gone), or choose another run.dir"
        )
    if ignore_values or recorded.values is None:
        return
    if model.values_fingerprint() not in (None, recorded.values):
        raise ConfigError(
            f"{run} was started from other initial values than {model.class_name} has now. To go "
            "on with the run's own weights, pass Trainer(..., ignore_initial_values=True), or call "
            "torch.manual_seed before the module is built, in every run of the script; to train "
            "this module, choose another run.dir"
        )
