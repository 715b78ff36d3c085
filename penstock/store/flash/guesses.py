"""Which clip factor to expect of a step, before its gradients have arrived.

Only the factor 1 can be guessed. Where clipping binds, the factor is a quotient of the norm of all
gradients, and no estimate meets all of its 53 bits: a guess has to be exact to be of use.

Tests force guesses with the environment variable `PENSTOCK_SPECULATE`: `on`, `wrong` (every guess
fails), or `mixed:SEED` (no guess, a right one or a wrong one, of some of the units, as the seed and
the step decide). A forced guess is speculated to its end, so that a test does not depend on time.
"""

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from penstock.errors import ConfigError
from penstock.store.interface import Decision

ENVIRONMENT_VARIABLE = "PENSTOCK_SPECULATE"

Speculate = Literal["off", "on", "auto"]


@dataclass(frozen=True)
class Guess:
    """The factor that is expected of a step.

    Attributes:
        clip_scale: the factor.
        is_for: whether a unit, by its number, is updated by the guess.
        waits: whether gradients are accepted only after the updates that can be made.
    """

    clip_scale: float = 1.0
    is_for: Callable[[int], bool] = lambda unit: True
    waits: bool = False


class Guesses(Protocol):
    """Guesses the factors of steps."""

    def of(self, step: int) -> Guess | None:
        """Return the guess of a step, from 1; None if there should be none."""
        ...

    def expects(self, stage: int, squares: float) -> bool:
        """Return whether the guess of the step is still expected to be right.

        **Arguments:** `squares` is the sum of the squares of the gradients up to this stage's.
        """
        ...

    def decided(self, decision: Decision, was_right: bool | None) -> None:
        """Learn from a step.

        **Arguments:** `was_right` says whether its guess was; None if nothing was speculated.
        """
        ...


class _FixedGuesses:
    """Guesses that learn nothing."""

    def expects(self, stage: int, squares: float) -> bool:
        """Return true."""
        return True

    def decided(self, decision: Decision, was_right: bool | None) -> None:
        """Learn nothing."""


class NoGuesses(_FixedGuesses):
    """No step is speculated."""

    def of(self, step: int) -> Guess | None:
        """Return None."""
        return None


class NoClipping(_FixedGuesses):
    """No step is expected to clip."""

    def of(self, step: int) -> Guess | None:
        """Return the factor 1."""
        return Guess()


class ForcedGuesses(_FixedGuesses):
    """The guesses of tests, the same in every process.

    **Arguments:** `kind` is `on`, `wrong` or `mixed`, `seed` that of mixed ones.
    """

    _WRONG = math.nextafter(1.0, 2.0)  # no factor is above 1

    def __init__(self, kind: str, seed: int = 0) -> None:
        self._kind, self._seed = kind, seed

    def of(self, step: int) -> Guess | None:
        """Return the guess of a step."""
        if self._kind != "mixed":
            return Guess(1.0 if self._kind == "on" else self._WRONG, waits=True)
        drawn = random.Random(f"{self._seed} {step}")
        factor, share = drawn.choice((None, 1.0, 1.0, self._WRONG)), drawn.choice((0.5, 1.0))
        units = drawn.getrandbits(64)
        if factor is None:
            return None

        def is_for(unit: int) -> bool:
            return share == 1.0 or bool(units >> unit % 64 & 1)

        return Guess(factor, is_for, waits=drawn.random() < 0.5)


def forced_guesses() -> Guesses | None:
    """Return the guesses that a test forces, if there are any.

    **Raises:** `ConfigError` if the environment names guesses that do not exist.
    """
    forced = os.environ.get(ENVIRONMENT_VARIABLE)
    if not forced:
        return None
    if forced == "off":
        return NoGuesses()
    kind, _, seed = forced.partition(":")
    if kind not in ("on", "wrong", "mixed") or not (seed or "0").isdecimal():
        raise ConfigError(
            f"{ENVIRONMENT_VARIABLE}: expected off, on, wrong or mixed:SEED, got {forced!r}"
        )
    return ForcedGuesses(kind, int(seed or 0))
