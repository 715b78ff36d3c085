"""Encodes the shards' reports on gradients, and the commit decision, as message bodies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProtocolError
from penstock.store import (
    Compared,
    Decision,
    GradientReport,
)


@dataclass(frozen=True)
class ShardReport:
    """A shard's report before a step is decided.

    `held` are checksums of a part of the shard's state, if the shard has several replicas: replicas
    send equal checksums. `kept` are the numbers of entries of the shard's parts of sparse weights,
    in the order of the program.
    """

    gradients: GradientReport
    held: Compared = ()
    kept: Sequence[int] = ()

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> ShardReport:
        """Return the report in a message body.

        **Raises:** `ProtocolError` if the body has no valid report.
        """
        gradients, held = report_of(body), body.get("held", [])
        try:
            checks = tuple((_name(what), _name(sum_)) for what, sum_ in held)
        except (TypeError, ValueError) as error:
            raise _invalid("checksums of the shard's state", body, error) from None
        try:
            kept = tuple(map(_count, body.get("kept", [])))
        except (TypeError, ValueError) as error:
            raise _invalid("numbers of entries of sparse weights", body, error) from None
        return cls(gradients, checks, kept)

    def difference(self, other: ShardReport) -> str | None:
        """Return the difference from another replica's report; None if the reports are equal."""
        # Encoded reports are compared, because NaN is not equal to itself.
        if body_of_report(self.gradients) != body_of_report(other.gradients):
            return "the gradients of the step"
        if self.kept != other.kept:
            return "the numbers of entries of sparse weights"
        for ours, theirs in itertools.zip_longest(self.held, other.held):
            if ours != theirs:
                return str((ours or theirs)[0])
        return None


def body_of_report(report: GradientReport) -> dict[str, Any]:
    """Return the message body of a report; hexadecimal numbers keep all their bits."""
    return {
        "squares": [square.hex() for square in report.squares],
        "silent": list(report.silent),
        "missing": list(report.missing),
        "non_finite": {
            str(stage): list(names) for stage, names in (report.non_finite or {}).items()
        },
        "zero": dict(report.zero),
    }


def report_of(body: Mapping[str, Any]) -> GradientReport:
    """Return the report in a message body.

    **Raises:** `ProtocolError` if the body has no valid report.
    """
    try:
        return GradientReport(
            tuple(float.fromhex(square) for square in body["squares"]),
            tuple(map(int, body["silent"])),
            tuple(map(_name, body["missing"])),
            {int(stage): tuple(map(_name, names)) for stage, names in body["non_finite"].items()},
            {_name(name): int(elements) for name, elements in body["zero"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _invalid("a report on gradients", body, error) from None


def body_of_decision(decision: Decision) -> dict[str, Any]:
    """Return the message body of a decision; hexadecimal numbers keep all their bits."""
    return {
        "step": decision.step,
        "norm": decision.norm.hex(),
        "clip_scale": decision.clip_scale.hex(),
        "learning_rate": decision.learning_rate.hex(),
    }


def decision_of(body: Mapping[str, Any]) -> Decision:
    """Return the decision in a message body.

    **Raises:** `ProtocolError` if the body has no valid decision.
    """
    try:
        return Decision(
            int(body["step"]),
            _finite(body["norm"]),
            _finite(body["clip_scale"]),
            _finite(body["learning_rate"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _invalid("a decision", body, error) from None


def _finite(text: str) -> float:
    value = float.fromhex(text)
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a number of entries")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a name")
    return value


def _invalid(expected: str, body: Mapping[str, Any], error: Exception) -> ProtocolError:
    return ProtocolError(
        f"expected {expected}, got {str(body)[:80]!r} ({type(error).__name__}: {error}); do all "
        "nodes run the same version of Penstock?"
    )
