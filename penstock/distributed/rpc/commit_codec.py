"""Reports on gradients and commits of a shard, as bodies of messages and back."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProtocolError
from penstock.store import (
    Commit,
    Compared,
    GradientReport,
)


@dataclass(frozen=True)
class ShardReport:
    """What a shard says before a step is decided.

    `held` are checksums of a part of what it holds, if it has a replica: the same of both.
    """

    gradients: GradientReport
    held: Compared = ()

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> ShardReport:
        """Return what a message has said.

        **Raises:** `ProtocolError` if it is no such report.
        """
        gradients, held = report_of(said), said.get("held", [])
        try:
            return cls(gradients, tuple((_name(what), _name(sum_)) for what, sum_ in held))
        except (TypeError, ValueError) as error:
            raise _none("checksums of what it holds", said, error) from None

    def difference(self, other: ShardReport) -> str | None:
        """Say in what it differs from that of another node of the shard; None if in nothing."""
        # As they are said: NaN is what it is, though not equal to itself.
        if body_of_report(self.gradients) != body_of_report(other.gradients):
            return "a step's gradients"
        for ours, theirs in itertools.zip_longest(self.held, other.held):
            if ours != theirs:
                return str((ours or theirs)[0])
        return None


def body_of_report(report: GradientReport) -> dict[str, Any]:
    """Return what a message says of a report; figures keep all their bits."""
    return {
        "squares": [square.hex() for square in report.squares],
        "silent": list(report.silent),
        "missing": list(report.missing),
        "non_finite": {
            str(stage): list(names) for stage, names in (report.non_finite or {}).items()
        },
        "zero": dict(report.zero),
    }


def report_of(said: Mapping[str, Any]) -> GradientReport:
    """Return the report that a message has said.

    **Raises:** `ProtocolError` if it is none.
    """
    try:
        return GradientReport(
            tuple(float.fromhex(square) for square in said["squares"]),
            tuple(map(int, said["silent"])),
            tuple(map(_name, said["missing"])),
            {int(stage): tuple(map(_name, names)) for stage, names in said["non_finite"].items()},
            {_name(name): int(elements) for name, elements in said["zero"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _none("a report on gradients", said, error) from None


def body_of_commit(commit: Commit) -> dict[str, Any]:
    """Return what a message says of a commit."""
    return {
        "step": commit.step,
        "grad_norm": commit.grad_norm.hex(),
        "clip_scale": commit.clip_scale.hex(),
        "learning_rate": commit.learning_rate.hex(),
    }


def commit_of(said: Mapping[str, Any]) -> Commit:
    """Return the commit that a message has said.

    **Raises:** `ProtocolError` if it is none.
    """
    try:
        return Commit(
            int(said["step"]),
            float.fromhex(said["grad_norm"]),
            float.fromhex(said["clip_scale"]),
            float.fromhex(said["learning_rate"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _none("a commit", said, error) from None


def _name(said: Any) -> str:
    if not isinstance(said, str):
        raise TypeError(f"{said!r} is no name")
    return said


def _none(what: str, said: Mapping[str, Any], error: Exception) -> ProtocolError:
    return ProtocolError(
        f"a shard says {str(said)[:80]!r} for {what} ({type(error).__name__}: {error}); do all "
        "nodes run the same version of Penstock?"
    )
