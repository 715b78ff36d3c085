"""Machine files: reads them, explains what is wrong with them, and writes them.

The library of known machines is the folder `library`: one file per machine, named as the machine.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.config import FileKind, Origin, dump_tables, explain, read
from penstock.errors import ConfigError, did_you_mean
from penstock.machines.description import MachineDescription
from penstock.machines.gpu_cluster import GpuCluster, known_gpu_clusters, load_gpu_cluster

LIBRARY = Path(__file__).parent / "library"
_SUFFIXES = (".yaml", ".yml")
_MOST_BYTES = 1 << 20
_KEYS_OF_A_RUN = {"model", "data", "run"}  # which no machine has


def known_machines() -> list[str]:
    """Return the names of the library's machines, in alphabetical order."""
    return sorted(path.stem for path in LIBRARY.glob("*.yaml"))


def load_machine(name_or_path: str | Path) -> MachineDescription:
    """Return a machine of the library, or the one that a YAML file describes.

    A text without a folder and without the ending `.yaml` is a name of the library. Raises
    `ConfigError` with one line per problem.
    """
    text = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or "/" in text or text.endswith(_SUFFIXES)
    if is_path:
        return _load_file(Path(name_or_path))
    known = known_machines()
    if text not in known:
        raise ConfigError(
            f"expected a machine, {', '.join(known)}, or the path of a machine file that ends in "
            f".yaml, got {text!r}{did_you_mean(text, known)}"
        )
    return _load_file(LIBRARY / f"{text}.yaml")


def load_any(name_or_path: str) -> MachineDescription | GpuCluster:
    """Return the machine, or the GPU cluster, of this name or file.

    A file describes a GPU cluster if it has the key `gpu`. Raises `ConfigError` with one line per
    problem.
    """
    clusters = known_gpu_clusters()
    if name_or_path in clusters:
        return load_gpu_cluster(name_or_path)
    if "/" in name_or_path or name_or_path.endswith(_SUFFIXES):
        path = Path(name_or_path)
        return load_gpu_cluster(path) if "gpu" in _read(path)[0] else load_machine(path)
    known = known_machines()
    if name_or_path not in known:
        raise ConfigError(
            f"expected a machine ({', '.join(known)}), a GPU cluster ({', '.join(clusters)}), or "
            f"the path of a file that ends in .yaml, got {name_or_path!r}"
            f"{did_you_mean(name_or_path, [*known, *clusters])}"
        )
    return load_machine(name_or_path)


def dump(machine: MachineDescription) -> str:
    """Return a machine as YAML that `load_machine` reads back as an equal machine."""
    return dump_tables(machine.model_dump(mode="json", exclude_defaults=True))


def _load_file(path: Path) -> MachineDescription:
    data, lines = _read(path)
    try:
        return MachineDescription.model_validate(data)
    except ValidationError as error:
        origin = Origin(name=str(path), lines=lines)
        raise ConfigError(explain(error, MachineDescription, origin)) from None


def _read(path: Path) -> tuple[dict[str, Any], dict[tuple[str | int, ...], int]]:
    start = f"give one of {', '.join(known_machines())}, or start from {LIBRARY / 'hosts-10g.yaml'}"
    data, lines = read(path, FileKind("name: rack", start, _MOST_BYTES))
    if not data:
        raise ConfigError(f"{path}: expected a machine, got an empty file; {start}")
    if "name" not in data and _KEYS_OF_A_RUN & data.keys():
        raise ConfigError(
            f"{path}: expected the description of a machine, got the configuration of a run; "
            f"{start}"
        )
    return data, lines
