"""Loads a run's YAML file with overrides; used by the command line and by the trainer."""

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.cluster import cluster_keys
from penstock.config.document import read
from penstock.config.model_file import with_model_file
from penstock.config.presets import PRESETS
from penstock.config.problems import Origin
from penstock.config.record import default_run_dir
from penstock.config.root import Config
from penstock.errors import ConfigError, did_you_mean, few, missing_folder


def load(path: str | Path, overrides: Sequence[str] = (), *, training: bool = False) -> Config:
    """Return the configuration of a YAML file with `key=value` overrides applied.

    `training` also asks that the data set, or the files to build it from, exist. A file NAME.yaml
    that does not set run.dir gets runs/NAME. Paths are relative to the current folder. Raises
    `ConfigError` with one line per problem.
    """
    path = Path(path)
    if str(path) in PRESETS and not path.exists():
        raise ConfigError(
            f"{path}: expected a YAML file, got the name of a preset; `penstock init {path}.yaml "
            f"--model {path}` writes a starter with it"
        )
    data, lines = read(path)
    origin = Origin(name=str(path), lines=lines)
    run = data.get("run")
    if run is None or (isinstance(run, dict) and "dir" not in run):
        data["run"] = {"dir": str(default_run_dir(path)), **(run or {})}
    config = Config.from_mapping(data, overrides, origin)
    if config.model is None:
        raise ConfigError(f"{path}: model: missing; add for example `model: gpt2`")
    if training:
        check_data(config, origin)
    return config


def to_config(config: Config | Mapping[str, Any] | str | Path, cluster: str | None) -> Config:
    """Return the configuration that results from `Trainer(config, cluster=...)`.

    It has the content of the file that `model.hf_config` names (`model_file.py`).
    """
    if isinstance(config, Mapping):
        config = Config.from_mapping(config)
    elif isinstance(config, str | Path):
        config = load(config)
    elif not isinstance(config, Config):
        raise ConfigError(
            f"expected a configuration: a mapping or the path of a YAML file; got "
            f"{type(config).__name__}. A model goes into Trainer(configuration, model=...)"
        )
    config = with_model_file(config)
    if cluster is None:
        return config
    whole = config.to_mapping()
    for section, keys in cluster_keys(cluster).items():
        whole[section] |= keys
    return Config.from_mapping(whole)


def check_data(config: Config, origin: Origin | None = None) -> None:
    """Raise `ConfigError` unless there is a data set, or files to build one from."""
    origin = origin or Origin()
    data = config.data
    if data.path is None and not data.input:
        raise ConfigError(
            f"{origin.place(('data',))}data: neither path nor input is given; set data.path to a "
            "folder made by `penstock data build`, or data.input to a list of text files"
        )
    if config.data_dir.exists():
        return
    if not data.input:
        raise ConfigError(
            f"{origin.named(('data', 'path'))}{data.path} does not exist; make it with "
            f"`penstock data build --input FILES --tokenizer bytes --out {data.path}`, or list "
            "files in data.input"
        )
    spec = config.tokenizer
    if spec != "bytes" and not spec.startswith("train-bpe:") and not Path(spec).exists():
        if data.tokenizer == "auto":
            raise ConfigError(
                f"{origin.named(('model', 'hf'))}expected a folder on this machine, "
                f"{spec} does not exist; {missing_folder(spec)}"
            )
        raise ConfigError(
            f"{origin.named(('data', 'tokenizer'))}expected bytes, train-bpe:SIZE "
            f"or the path of a tokenizer, got {spec!r}, which does not exist"
            f"{did_you_mean(spec, ['bytes', 'train-bpe:4096'])}"
        )
    missing = [number for number, name in enumerate(data.input) if not _matches_something(name)]
    if missing:
        names = few([repr(data.input[number]) for number in missing])
        is_one = len(missing) == 1
        key = ("data", "input", missing[0]) if is_one else ("data", "input")
        raise ConfigError(
            f"{origin.named(key)}{names} "
            f"{'matches' if is_one else 'match'} no file; paths are relative to the "
            f"current folder, {Path.cwd()}"
        )


def _matches_something(pattern: str) -> bool:
    return Path(pattern).exists() or any(glob.iglob(pattern, recursive=True))
