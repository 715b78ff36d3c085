"""The parameters of a wafer's cores and of the mesh that joins them, with their sources.

Two named sets are given. `SIM` has the costs that the vendor's simulator shows, `SILICON` those
that third parties measured on machines; the simulator is known to be optimistic on memory paths.
Cycles are those of the cores' clock.

A source begins with one of: published (by the maker), third party (measured by others), derived
(from such figures), fitted (to rows that are named), assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.errors import ConfigError

_MOST_CORES = 10_000_000  # ten times the largest wafer; a mesh beyond is a mistake


@dataclass(frozen=True)
class Mesh:
    """A rectangle of cores.

    Raises:
        ConfigError: no cores, or more than ten million.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"mesh: expected {name} from 1 up, got {value!r}; a CS-2 has 750 rows and 994 "
                    "columns, for example mesh: 750x994"
                )
        if self.cores > _MOST_CORES:
            raise ConfigError(
                f"mesh: expected at most {_MOST_CORES:,} cores, got {self.rows} x {self.columns} = "
                f"{self.cores:,}; a CS-2 has 750 x 994"
            )

    @property
    def cores(self) -> int:
        """The number of cores."""
        return self.rows * self.columns

    @property
    def diameter(self) -> int:
        """Hops between opposite corners."""
        return self.rows + self.columns - 2

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Return the mesh that a text such as `32x32` names: rows, then columns."""
        rows, times, columns = text.strip().lower().partition("x")
        if not (times and rows.strip().isdecimal() and columns.strip().isdecimal()):
            raise ConfigError(
                f"mesh: expected rows and columns such as 32x32, got {text!r}; a CS-2 has 750x994"
            )
        return cls(int(rows), int(columns))

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


CS2_MESH = Mesh(750, 994)
"""The cores of a CS-2 that a program may use (published: csl-examples, single-tile-matvec)."""


def _number(default: Any, least: float, *, above: bool = False, unit: str = "cycles") -> Any:
    """Declare a field with its smallest value; `above` excludes that value itself."""
    return field(default=default, metadata={"least": least, "above": above, "unit": unit})


@dataclass(frozen=True)
class CoreParameters:
    """The costs of one core, its router and its links.

    Attributes:
        name: of the set.
        clock_hz: of all cores.
        sram_bytes: memory of a core, for code and data.
        simd_half, simd_float: multiply-adds per cycle of 16-bit and of 32-bit numbers, if memory
            keeps up.
        task_cycles: from the arrival of a message to the first instruction of its task.
        vector_cycles: to set up one vector operation, in a sequence of them.
        loop_cycles: of one iteration of a loop besides its body.
        hop_cycles: of a message from one router to the next.
        word_cycles: between two words on one link, at least 1.
        ramp_cycles: of a message between a core and its router.
        queue_words: depth of a router's queue for one colour and direction.
        partial_sum_cycles: of a core for one output feature, to pass a partial sum on.
        drain_cycles: from the last element of a vector operation to an instruction that needs it;
            a sequence of independent operations hides it.
        half_group_cycles, float_group_cycles: of a vector operation for each `simd_half` or
            `simd_float` elements, with its operands in memory.
        dot_group_cycles: the same of a dot product, whose sum is one number, for each `simd_half`
            elements of either type, if that is more.
        reserved_bytes: of the memory, that the program and the runtime take.
        scalar_cycles: of an operation on registers, or a branch.
        threads_share_data_path: whether a vector operation stops while another thread of the core
            computes.
        host_bits_per_second: of the links between the wafer and its hosts, each way.
        sources: where each figure comes from, by field.

    Raises:
        ConfigError: a value that no machine can have, one line per value.
    """

    name: str
    clock_hz: float = _number(1.1e9, 0, above=True, unit="Hz")
    sram_bytes: int = _number(48 * 1024, 1, unit="bytes")
    simd_half: int = _number(4, 1, unit="multiply-adds per cycle")
    simd_float: int = _number(1, 1, unit="multiply-adds per cycle")
    task_cycles: float = _number(2.0, 0)
    vector_cycles: float = _number(0.0, 0)
    loop_cycles: float = _number(0.0, 0)
    hop_cycles: float = _number(1.0, 0, above=True)
    word_cycles: float = _number(1.0, 1)
    ramp_cycles: float = _number(2.0, 0)
    queue_words: int = _number(4, 1, unit="words")
    partial_sum_cycles: float = _number(4.0, 0)
    drain_cycles: float = _number(0.0, 0)
    half_group_cycles: float = _number(1.0, 1)
    float_group_cycles: float = _number(1.0, 1)
    dot_group_cycles: float = _number(1.0, 1)
    reserved_bytes: int = _number(4176, 0, unit="bytes")
    scalar_cycles: float = _number(1.0, 0)
    threads_share_data_path: bool = field(default=True, metadata={"unit": "yes or no"})
    host_bits_per_second: float = _number(1.2e12, 0, above=True, unit="bit/s")
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def usable_bytes(self) -> int:
        """Memory of a core for data."""
        return self.sram_bytes - self.reserved_bytes

    @property
    def host_words_per_cycle(self) -> float:
        """Words of 32 bits that enter, or leave, the whole wafer in a cycle."""
        return self.host_bits_per_second / 32 / self.clock_hz

    @property
    def trigger_cycles(self) -> float:
        """Of a vector operation that the arrival of a message starts, besides its elements."""
        return self.task_cycles + self.vector_cycles

    def elements_cycles(self, elements: int, element_bytes: int = 2) -> float:
        """Return the cycles of a vector operation for its elements, without its set-up."""
        half = element_bytes == 2
        width = self.simd_half if half else self.simd_float
        group = self.half_group_cycles if half else self.float_group_cycles
        return math.ceil(elements / width) * group

    def dot_cycles(self, elements: int, element_bytes: int = 2) -> float:
        """Return the cycles of a dot product for its elements, whose sum is one number."""
        into_one = math.ceil(elements / self.simd_half) * self.dot_group_cycles
        return max(into_one, self.elements_cycles(elements, element_bytes))

    def alone_cycles(self, elements: int, element_bytes: int = 2) -> float:
        """Return the cycles of one vector operation whose result is waited for."""
        elements_cycles = self.elements_cycles(elements, element_bytes)
        return self.vector_cycles + elements_cycles + self.drain_cycles

    def seconds(self, cycles: float) -> float:
        """Return the time of some cycles."""
        return cycles / self.clock_hz


def figure_fields() -> dict[str, Any]:
    """Return the fields of a set that describe the core, by name."""
    return {item.name: item for item in fields(CoreParameters) if "unit" in item.metadata}


def _problems(given: CoreParameters) -> Iterator[str]:
    """Yield what is wrong with the values of a set."""
    if not isinstance(given.name, str) or not given.name:
        yield f"name: expected a text, got {given.name!r}; name the set"
    wrong = False
    for name, item in figure_fields().items():
        text = _wrong_figure(getattr(given, name), item)
        if text:
            wrong = True
            yield f"{name}: {text}"
    if not wrong and given.reserved_bytes >= given.sram_bytes:
        yield (
            f"reserved_bytes: expected less than sram_bytes ({given.sram_bytes}), got "
            f"{given.reserved_bytes}; data needs memory too"
        )
    unknown = set(given.sources) - set(figure_fields())
    if unknown:
        yield f"sources: expected names of figures, got {', '.join(sorted(unknown))}; remove them"


def _wrong_figure(value: Any, item: Any) -> str:
    """Return what is wrong with a figure, or nothing."""
    if "least" not in item.metadata:
        return "" if isinstance(value, bool) else f"expected true or false, got {value!r}"
    whole = item.type == "int"
    least, unit = item.metadata["least"], item.metadata["unit"]
    above = item.metadata["above"]
    bound = f"above {least:g}" if above else f"from {least:g} up"
    wanted = f"expected {'a whole number' if whole else 'a number'} {bound} ({unit}), got {value!r}"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return wanted
    if not math.isfinite(value) or value < least or (above and value == least):
        return wanted
    return ""


_SHARED_SOURCES = {
    "clock_hz": (
        "published: 1.1 GHz (Hot Chips 34), the only one that gives the 7.5 PFLOP/s quoted for "
        "16-bit products. In conflict with the 0.85 GHz of the timing formulas in the vendor's SDK"
    ),
    "sram_bytes": "published: 48 kB per core, 40 GB on the wafer",
    "simd_half": (
        "published: 3.4 M units on 850,000 cores; four multiply-adds also use all of the two "
        "64-bit reads and the one 64-bit write that memory gives per cycle"
    ),
    "simd_float": "assumed: one multiply-add of 32 bits per cycle; four 16-bit ones are published",
    "task_cycles": "assumed: 2, the least that a trigger and an address can take",
    "ramp_cycles": "third party: T_R = 2 in the model of collectives (arXiv:2404.15888)",
    "queue_words": ("third party: depths of 2 to 6 words are reported, by queue; 4 is between"),
    "partial_sum_cycles": "published: four cycles per output row, quoted; the text was not found",
    "reserved_bytes": "third party: 44,976 of 49,152 bytes are usable (WSE-3 notes)",
    "scalar_cycles": "assumed: one instruction",
    "threads_share_data_path": (
        "third party: a vector operation beside scalar work does not overlap with it (WSE-3 notes)"
    ),
    "host_bits_per_second": "published: 1.2 Tb/s, twelve ports of 100 Gb/s",
}

SIM = CoreParameters(
    "sim",
    vector_cycles=7.0,
    loop_cycles=7.0,
    drain_cycles=9.0,
    float_group_cycles=1.25,
    sources={
        **_SHARED_SOURCES,
        "vector_cycles": (
            "fitted: to 2,840 cycles of 256 operations on 16 elements by @map (4 cycles of "
            "arithmetic each), with drain_cycles. An operation that is waited for takes both"
        ),
        "loop_cycles": "fitted: to 4,617 cycles of the same 256 operations in a while loop",
        "hop_cycles": "third party: 1 cycle per hop, quoted",
        "word_cycles": (
            "derived: a word per link and cycle, from 28 PB/s of fabric; the simulator shows 1.001"
        ),
        "drain_cycles": (
            "derived: one operation on 4,096 elements takes 1,040 cycles, 16 more than its "
            "elements; vector_cycles of them are the set-up"
        ),
        "half_group_cycles": "derived: the same row, 1,024 groups in 1,024 cycles",
        "float_group_cycles": (
            "fitted: with index_cycles of penstock.wafer.published, to three rows of sparse "
            "products. Banks of memory in conflict would explain more than 1"
        ),
        "dot_group_cycles": "assumed: as other vector operations, with several partial sums",
    },
)
"""What the vendor's simulator shows."""

SILICON = CoreParameters(
    "silicon",
    vector_cycles=16.0,
    loop_cycles=7.0,
    hop_cycles=2.0,
    word_cycles=1.125,
    half_group_cycles=1.37,
    float_group_cycles=1.71,
    dot_group_cycles=8.0,
    sources={
        **_SHARED_SOURCES,
        "vector_cycles": (
            "third party: 15 to 17 per vector operation (WSE-3 notes). That operations in a "
            "sequence pay all of it is assumed; the simulator shows 7 there"
        ),
        "loop_cycles": "assumed: that of the simulator",
        "hop_cycles": "third party: 2.000 on a WSE-3",
        "word_cycles": "third party: 1.125 per word on a WSE-3",
        "drain_cycles": "assumed: part of vector_cycles",
        "half_group_cycles": (
            "third party: 2.92 multiply-adds of 16 bits per cycle on a WSE-3, of 4 in the simulator"
        ),
        "float_group_cycles": (
            "derived: 1.37 times that of the simulator, as for 16 bits; 1.37 to 1.66 is reported "
            "for memory-bound code"
        ),
        "dot_group_cycles": (
            "third party: a sum into one number takes 2 cycles per element (WSE-3 notes), so 8 per "
            "four. Partial sums in several places may avoid it"
        ),
    },
)
"""What third parties measured on machines, mostly of the next generation (WSE-3)."""
