"""What a program has placed on the mesh before it is lowered: code, values, words at the edges."""

from dataclasses import dataclass, field

import numpy as np

from penstock.wafer.language.arrays import Array
from penstock.wafer.language.code import Code


@dataclass(frozen=True, eq=False)
class Placed:
    """Code of some cores: the beginning of a thread (colour -1), or a task."""

    code: Code
    cores: np.ndarray
    colour: int
    kind: int


@dataclass(frozen=True, eq=False)
class Feed:
    """Words that enter at an edge; each has two numbers."""

    colour: int
    core: int
    side: int
    numbers: tuple[np.ndarray, ...]
    kinds: np.ndarray
    from_host: bool


@dataclass(frozen=True)
class Sink:
    """Words that leave at an edge."""

    colour: int
    core: int
    side: int
    words: int
    to_host: bool


@dataclass
class Layout:
    """What a program has placed."""

    values: list[tuple[Array, np.ndarray, np.ndarray]] = field(default_factory=list)
    registers: list[np.ndarray] = field(default_factory=list)
    counters: list[np.ndarray] = field(default_factory=list)
    counter_names: list[str] = field(default_factory=list)
    codes: list[Placed] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
