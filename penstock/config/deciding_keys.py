"""The keys that decide the bits of a run, and the checks for a resume."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from penstock.config.model_file import read_model_file, with_model_file
from penstock.config.root import Config
from penstock.config.schedule import DECAYING
from penstock.config.sparsity import places_as_steps
from penstock.errors import ConfigError

# The other keys (engines, budgets, recomputation, folders, logging, evaluation and saving) change
# neither weights nor losses. Two settings depend on budgets: the micro-batch of `batch.micro: auto`
# affects bits and is recorded separately; the cuts between stages affect no bit
# (`compiler/cut.py`). The paths of the text and of the initial checkpoint do not matter either: the
# trainer compares fingerprints of their content.
_DECIDING = ("model", "batch", "precision", "optimizer", "freeze")
# Keys that did not exist when older runs were recorded, with the value that those runs used.
_LATER = {"optimizer.moments": "fp32"}
# A model's config.json is recorded by its content; older releases recorded its path here.
_MODEL_FILE = "model.hf_config"
# Keys of its content that describe the file, not the model.
_IGNORED = {f"{_MODEL_FILE}.{key}" for key in ("_name_or_path", "transformers_version")}
# Keys of `sparsity` that a share of the run may stand for; steps are compared.
_PLACES = ("schedule.begin", "schedule.end", "update_begin", "update_end", "densify_at")


def trajectory(config: Config) -> dict[str, Any]:
    """Return the keys that decide every bit of the run's weights, dotted, with JSON-able values."""
    whole = config.to_mapping()
    flat: dict[str, Any] = {}
    for key in _DECIDING:
        _flatten(key, whole[key], flat)
    if "model.hf" in flat:
        flat["model.hf"] = "a checkpoint"
    for key, value in _LATER.items():
        if flat[key] == value:
            del flat[key]
    # Recorded only if set: a run from before these keys existed can be resumed.
    if config.train:
        flat["train"] = whole["train"]
    if config.lora.rank is not None:
        _flatten("lora", whole["lora"], flat)
    if config.sparsity.method is not None:
        _flatten("sparsity", whole["sparsity"], flat)
        for key, step in places_as_steps(config.sparsity, config.run.steps).items():
            flat[f"sparsity.{key}"] = step
    # The simulated mesh adds in another order; the closed form computes as the CPU does.
    if config.engine.device == "wafer" and config.engine.cycles == "simulated":
        flat["engine.cycles"], flat["engine.mesh"] = config.engine.cycles, config.engine.mesh
    flat["store.gradients"] = config.gradient_precision
    flat["data.sequence_length"] = config.data.sequence_length
    flat["data.seed"] = config.data.seed
    flat["run.seed"] = config.run.seed
    # Under a decaying schedule, a longer run differs from its first step. Under the other schedules
    # it is the same run, longer.
    decays = config.optimizer.schedule.name in DECAYING
    flat["optimizer.schedule.decay_steps"] = config.decay_steps if decays else None
    return flat


def digest(config: Config) -> str:
    """Return the hash of a run's trajectory, as 32 hex digits: equal digests, equal weights after
    equal steps."""
    text = json.dumps(trajectory(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_resumable(config: Config, recorded: Mapping[str, Any]) -> None:
    """Raise `ConfigError`, naming the keys, unless a recorded run can be resumed with this
    configuration.

    `recorded` is the `trajectory` in the run's checkpoint. If an older release recorded only the
    path of the model's config.json, and the file no longer exists, the model is not compared.
    """
    then, now = dict(recorded), trajectory(with_model_file(config))
    place = then.get(_MODEL_FILE)
    if isinstance(place, str) and _MODEL_FILE not in now:
        del then[_MODEL_FILE]
        fields = read_model_file(place)
        if fields is not None:
            _flatten(_MODEL_FILE, fields, then)
        elif any(map(_is_of_model_file, now)):
            now = {key: value for key, value in now.items() if not _is_of_model_file(key)}
    elif isinstance(now.get(_MODEL_FILE), str) and any(map(_is_of_model_file, then.keys() - now)):
        raise ConfigError(
            f"{_MODEL_FILE}: expected a config.json with a model_type at {now[_MODEL_FILE]}, there "
            "is none that can be read; restore it, or resume with the run's own copy: penstock "
            f"train {config.run.dir / 'config.yaml'}"
        )
    _refuse(config, differences(then, now))


def _is_of_model_file(key: str) -> bool:
    return key.startswith(f"{_MODEL_FILE}.")


def check_same_sparsity(config: Config, recorded: Mapping[str, Any]) -> None:
    """Raise `ConfigError`, naming the keys, unless the recorded run has the same sparse weights.

    Everything that opens the state of a run needs this, and not only a resume: masks are part of
    it.
    """
    now = trajectory(config)
    then, now = ({k: v for k, v in keys.items() if _is_mask(k)} for keys in (recorded, now))
    _refuse(config, differences(then, now))


def _is_mask(key: str) -> bool:
    return key.startswith("sparsity.")


def _refuse(config: Config, lines: list[str]) -> None:
    if lines:
        raise ConfigError(
            "\n".join(
                [
                    f"{config.run.dir} holds a run whose configuration differs in keys that "
                    "decide the result:",
                    *(f"  {line}" for line in lines),
                    "set these back to resume it, or choose another run.dir to start a new run",
                ]
            )
        )


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per key that differs between a recorded trajectory and this one."""
    lines = []
    for key in [key for key in dict.fromkeys([*recorded, *now]) if key not in _IGNORED]:
        old, new = (run.get(key, _LATER.get(key)) for run in (recorded, now))
        if _plain(old) != _plain(new):
            hint = ""
            if _is_mask(key) and key.removeprefix("sparsity.") in _PLACES:
                hint = f" (as a step; set it to {old})"
            if key == "optimizer.schedule.decay_steps" and old is not None:
                hint = f" (run.steps if unset; set it to {old} to continue at the final rate)"
            lines.append(f"{key}: {_shown(old)} in the run, {_shown(new)} now{hint}")
    return lines


def _flatten(key: str, value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for inner, item in value.items():
            _flatten(f"{key}.{inner}", item, flat)
    else:
        flat[key] = value


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _shown(value: Any) -> str:
    return json.dumps(value)
