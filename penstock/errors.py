"""Every error that a user can cause or see, in one small hierarchy.

A message states the expected value, the actual value, and the next action. The command line prints
the message without a traceback and exits with the class's `exit_code`; these codes are stable.
"""

import difflib
import re
from collections.abc import Iterable, Sequence


class PenstockError(Exception):
    """Base of all errors raised on purpose; not raised itself."""

    exit_code = 1
    is_from_source = False  # a data source raised it, which leaves the committed state valid


class ConfigError(PenstockError):
    """A configuration value, key or command-line argument that cannot be used."""

    exit_code = 2


class MeshError(ConfigError):
    """A program for the mesh of cores with a mistake: a route, a queue or an address of it."""


class DataError(PenstockError):
    """Training text or a data set that is missing, empty or corrupt, or does not fit the model."""

    exit_code = 3


class CompileError(PenstockError):
    """A model that cannot be compiled into a program."""

    exit_code = 4


class BudgetError(PenstockError):
    """A byte budget that is smaller than the minimum working set."""

    exit_code = 5


class CorruptionError(PenstockError):
    """Stored bytes that do not match their checksum or their format."""

    exit_code = 6


class StorageError(PenstockError):
    """A folder cannot be used: its disk is full, read-only or failing, or a process uses it."""

    exit_code = 7


class NonFiniteError(PenstockError):
    """A loss, gradient or weight that is NaN or infinite: not committed, saved or exported."""

    exit_code = 8


class NoTrainingError(PenstockError):
    """A trainable weight that received no gradient, or did not change after the first step."""

    exit_code = 9


class ClusterError(PenstockError):
    """Processes of a run that cannot find, authenticate or understand each other."""

    exit_code = 10


class UnfitHostError(ClusterError):
    """A host that does not meet a run's requirements; another host might."""


class GroupError(ClusterError):
    """The devices of one host that compute together can no longer communicate."""


class ProgramError(PenstockError):
    """A program that breaks a rule of the representation: a defect of the compiler."""

    exit_code = 70


class ProtocolError(PenstockError):
    """A message with a correct checksum that no node of the run would send: a defect, or another
    version of Penstock."""

    exit_code = 71


def require_utf8(name: str, text: str) -> None:
    """**Raises:** `ConfigError` if a text has bytes that were not UTF-8 (lone surrogates)."""
    if any("\ud800" <= each <= "\udfff" for each in text):
        raise ConfigError(f"{name}: expected text in UTF-8, got {text!a}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest of `known`, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def install_extra(extra: str) -> str:
    """Return how to install the packages of an optional feature, as a part of a message.

    The package of this name on PyPI is another project.
    """
    return f"give `python -m pip install '.[{extra}]'` in the clone of Penstock"


def missing_folder(folder: str) -> str:
    """Return what to do about the folder of a model that does not exist, as a part of a message.

    `NAME` or `OWNER/NAME` may be meant as a model of the Hugging Face hub, other paths cannot.
    """
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", folder):
        return f"for a model of the hub: hf download {folder} --local-dir FOLDER"
    return "correct the path, or put a model of the hub there: hf download NAME --local-dir FOLDER"


def numbered(count: int, noun: str) -> str:
    """Return `1 engine` or `2 engines`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def few(names: Sequence[str], most: int = 5) -> str:
    """Return the first of `names` as a list in words, and the number of the others."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
