"""Every error that a user can cause or meet, in one small hierarchy.

A message says what was expected, what came, and what to do next. The command line prints the
message without a traceback and exits with the class's `exit_code`; these codes are stable.
"""

import difflib
from collections.abc import Iterable, Sequence


class PenstockError(Exception):
    """Base of all errors raised on purpose; never raised itself."""

    exit_code = 1


class ConfigError(PenstockError):
    """A configuration value, key or command-line argument that cannot be used."""

    exit_code = 2


class DataError(PenstockError):
    """Training text or a data set that is missing, empty, broken or does not fit the model."""

    exit_code = 3


class CompileError(PenstockError):
    """A model that cannot be made into a program."""

    exit_code = 4


class BudgetError(PenstockError):
    """A byte budget that cannot hold what must be held at once."""

    exit_code = 5


class CorruptionError(PenstockError):
    """Stored bytes that do not match their checksum or their format."""

    exit_code = 6


class StorageError(PenstockError):
    """The operating system refused to store something (disk full, read-only, I/O error)."""

    exit_code = 7


class NonFiniteError(PenstockError):
    """A loss, gradient or weight that is NaN or infinite: not committed, saved or exported."""

    exit_code = 8


class NoTrainingError(PenstockError):
    """A trainable weight that got no gradient, or did not change after the first step."""

    exit_code = 9


class ClusterError(PenstockError):
    """Processes of a run cannot find, trust or understand each other."""

    exit_code = 10


class UnfitHostError(ClusterError):
    """A host that cannot be what a run wants of it, as another host might."""


class GroupError(ClusterError):
    """The devices of one host that work together have lost each other."""


class ProgramError(PenstockError):
    """A program that breaks a rule of the representation: a defect of the compiler."""

    exit_code = 70


class ProtocolError(PenstockError):
    """A message between the nodes of a run that none of them would send: a defect, or another
    version of Penstock, since its checksum was right."""

    exit_code = 71


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the closest of `known`, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def few(names: Sequence[str], most: int = 5) -> str:
    """Return the first of `names` as a list in words, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
