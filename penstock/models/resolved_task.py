"""The task of a user's module: as given, or as its configuration says."""

from typing import Any

from penstock.errors import ConfigError, did_you_mean
from penstock.models.huggingface_config import find_task
from penstock.models.task_losses import TASKS


def resolved_task(
    task: str | None, config: Any, loss: object, inputs: object, targets: object
) -> str:
    """Return the task of a module.

    Args:
        task: as given; None if it is to be found.
        config: the module's configuration of `transformers`, or None.
        loss, inputs, targets: as given, or None.

    Raises:
        ConfigError: no such task, or one that has its own loss and inputs.
    """
    if task is None:
        own = loss is None and inputs is None and config is not None
        task = find_task(config) if own else "custom"
    if task not in TASKS:
        raise ConfigError(
            f"expected task {', '.join(TASKS)}, got {task!r}{did_you_mean(task, TASKS)}"
        )
    if task != "custom" and any(given is not None for given in (loss, inputs, targets)):
        raise ConfigError(f"loss, inputs and targets go with task: custom, not with {task}")
    return task
