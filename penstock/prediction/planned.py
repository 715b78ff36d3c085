"""From a configuration and a machine to a prediction: the decisions of training, on that machine.

This host is planned as training plans it, from the memory that is free now. Another machine is
planned from its description. Its engines have memory of their own, unless its processor is the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.config import Config
from penstock.errors import ConfigError
from penstock.kernels.processor import Processor
from penstock.machines import MachineDescription
from penstock.models import ModelSource
from penstock.planning import ExecutionPlan, Machine, builders, plan_execution
from penstock.planning.machine import DeviceMemory
from penstock.prediction.predict import Prediction, predict
from penstock.telemetry import process_memory

_DESCRIBED = "described"  # the target of engines that are known by their description alone
_SEQUENCE = 1  # tokens per sample of a model without a sequence


def plan_run(
    config: Config,
    machine: MachineDescription,
    notice: Callable[[str], None] = lambda text: None,
    *,
    is_here: bool = False,
    source: ModelSource | None = None,
) -> Prediction:
    """Return the prediction of a run on a machine.

    Args:
        config: of the run; `engines` is the number of engines.
        machine: the machine.
        notice: called with sentences for the user.
        is_here: whether the machine is this host; the memory that is free now then counts.
        source: the model, if it is not the configured one.

    Raises:
        BudgetError: the run does not fit; the message has the sum.
        ConfigError: the run cannot be planned on this machine.
    """
    most = machine.engine.most
    if most is not None and config.engines > most:
        raise ConfigError(
            f"engines: {machine.name} has at most {most} engines, got {config.engines}; lower "
            "engines, or choose another machine"
        )
    source = source or builders.source_of(config, None, False, notice)
    config = _as_on(machine, config)
    plan = planned(config, machine, source, notice, is_here=is_here)
    return predict(config, plan, machine)


def planned(
    config: Config,
    machine: MachineDescription,
    source: ModelSource,
    notice: Callable[[str], None],
    *,
    is_here: bool,
) -> ExecutionPlan:
    """Return the decisions that training makes on a machine."""
    read = Machine.here if is_here else lambda devices: _machine_of(machine)
    length = config.data.sequence_length or source.max_sequence_length or _SEQUENCE
    device = "cpu" if machine.engine.is_host else _DESCRIBED
    return plan_execution(config, source, device, length, notice=notice, read_machine=read)


def _as_on(machine: MachineDescription, config: Config) -> Config:
    """Return the configuration with its engines where the machine has them."""
    if machine.link is None or config.cluster.start != "none":
        return config
    cluster = config.cluster.model_copy(update={"start": "listen"})
    return config.model_copy(update={"cluster": cluster})


def _machine_of(machine: MachineDescription) -> Machine:
    """Return the state of a described machine: all of its memory is free."""
    memory = int(machine.store.memory)
    here = process_memory.resident_bytes()
    devices = {}
    if machine.engine.memory is not None:
        own = int(machine.engine.memory)
        devices[_DESCRIBED] = DeviceMemory(own, own)
    return Machine(
        Processor("x86_64", "GenuineIntel"),
        cores=machine.store.cores,
        resident_bytes=here,
        available_bytes=max(0, memory - here),
        devices=devices,
        micro_batch_tokens=machine.engine.micro_batch_tokens,
    )


def sweep(
    config: Config, key: str, values: Sequence[object], plan: Callable[[Config], Prediction]
) -> list[tuple[object, Prediction | str]]:
    """Return the prediction for each value of a key; the message of an error where there is none.

    **Arguments:** `plan` returns the prediction of a configuration.
    """
    found: list[tuple[object, Prediction | str]] = []
    for value in values:
        try:
            changed = Config.from_mapping(config.to_mapping(), [f"{key}={value}"])
            found.append((value, plan(changed)))
        except ConfigError as error:
            found.append((value, str(error)))
    return found
