"""Machine files: reads them, explains what is wrong with them, and writes them.

The library of known machines is the folder `library`: one file per machine, named as the machine.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from penstock.config import FileKind, Origin, dump_tables, explain, read
from penstock.errors import ConfigError, did_you_mean
from penstock.machines.description import MachineDescription

LIBRARY = Path(__file__).parent / "library"
_SUFFIXES = (".yaml", ".yml")
_MOST_BYTES = 1 << 20


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


def dump(machine: MachineDescription) -> str:
    """Return a machine as YAML that `load_machine` reads back as an equal machine."""
    return dump_tables(machine.model_dump(mode="json", exclude_defaults=True))


def _load_file(path: Path) -> MachineDescription:
    start = f"give one of {', '.join(known_machines())}, or start from {LIBRARY / 'hosts-10g.yaml'}"
    data, lines = read(path, FileKind("name: rack", start, _MOST_BYTES))
    if not data:
        raise ConfigError(f"{path}: expected a machine, got an empty file; {start}")
    try:
        return MachineDescription.model_validate(data)
    except ValidationError as error:
        origin = Origin(name=str(path), lines=lines)
        raise ConfigError(explain(error, MachineDescription, origin)) from None
