"""The codes of a program as rows of numbers, with the checks of each instruction."""

import math

import numpy as np

from penstock.errors import MeshError
from penstock.kernels import mesh_tables as tables
from penstock.kernels.mesh_tables import MeshTables
from penstock.wafer.language.instructions import Instruction
from penstock.wafer.language.layout import Layout, Placed
from penstock.wafer.mesh import Ticks
from penstock.wafer.parameters import CoreParameters, Mesh

_OPERANDS = (tables.D, tables.B, tables.C, tables.S)
_REGISTERS = (tables.LENGTH_REGISTER, *(place + tables.REGISTER for place in _OPERANDS))
_COUNTERS = (tables.GATE, tables.SECOND_GATE, tables.SIGNAL, tables.SECOND_SIGNAL)
_NONE = (
    tables.LENGTH_REGISTER,
    tables.IN_COLOUR,
    tables.OUT_COLOUR,
    tables.GATE,
    tables.SECOND_GATE,
    tables.SIGNAL,
    tables.SECOND_SIGNAL,
    *(operand + place for operand in _OPERANDS for place in (tables.BASE, tables.REGISTER)),
)
"""Fields of an instruction that are -1 where it has no such part."""
_NUMBER_LIMIT = 1 << 31


class CodeTable:
    """All codes, one after the other; each ends with an instruction of its own.

    Attributes:
        names: what each instruction is in words.
        starts: of each code, in instructions.
        factors: places of the factors in instructions.
    """

    def __init__(self, mesh: Mesh, core: CoreParameters, ticks: Ticks, layout: Layout) -> None:
        self.mesh, self.core, self.ticks, self.layout = mesh, core, ticks, layout
        self.names = [
            name
            for placed in layout.codes
            for name in (*(row.what for row in placed.code.rows), "end")
        ]
        sizes = [len(placed.code.rows) + 1 for placed in layout.codes]
        self.starts = np.cumsum([0, *sizes])[:-1]
        factors = {float(row.factor) for placed in layout.codes for row in placed.code.rows}
        self.factors = {factor: place for place, factor in enumerate(sorted(factors))}

    def fill(self, t: MeshTables) -> None:
        """Write the instructions of all codes and the factors in them."""
        t.factors[:] = list(self.factors)
        code = int(t.integers[tables.CODE])
        for placed, start in zip(self.layout.codes, self.starts.tolist(), strict=True):
            for place, item in enumerate(placed.code.rows, start):
                self._check_operands(placed, item)
                row = self._row(item)
                self._check_numbers(item, row, t.memory.shape[1])
                row[tables.TARGET] = code + (row[tables.TARGET] + start) * tables.CODE_FIELDS
                t.code[place] = row
            t.code[start + len(placed.code.rows), tables.OP] = tables.END

    def _row(self, item: Instruction) -> np.ndarray:
        """Return an instruction, whose target is counted from the beginning of its code."""
        row = np.zeros(tables.CODE_FIELDS, np.int64)
        row[list(_NONE)] = -1
        row[tables.OP] = item.op
        row[tables.TICKS] = self._instruction_ticks(item)
        row[tables.INTERVAL] = self.ticks.count(self.core.word_cycles)
        row[tables.FACTOR] = self.factors[float(item.factor)]
        for place, value in item.fields.items():
            if not -_NUMBER_LIMIT <= value < _NUMBER_LIMIT:
                raise MeshError(f"{item.what}: expected a number of 32 bits, got {value}")
            row[place] = value
        return row

    def _instruction_ticks(self, item: Instruction) -> int:
        most = (tables.MOST_INSTRUCTION_TICKS - 1) / self.ticks.per_cycle
        if not (math.isfinite(item.cycles) and 0 <= item.cycles <= most):
            raise MeshError(
                f"{item.what}: expected from 0 to {most:,.0f} cycles, got {item.cycles:,.10g}; "
                "divide the work"
            )
        return self.ticks.count(item.cycles)

    def _check_numbers(self, item: Instruction, row: np.ndarray, cells: int) -> None:
        """Refuse registers, counters and arrays that this program does not have."""
        registers = tables.THREADS + len(self.layout.registers)
        ends = [place + tables.HIGH for place in _OPERANDS]
        if (
            row[list(_REGISTERS)].max() >= registers
            or row[list(_COUNTERS)].max() >= len(self.layout.counters)
            or row[ends].max() > cells
        ):
            raise MeshError(
                f"{item.what}: a register, counter or array in it belongs to another program; make "
                "it with the program that runs"
            )

    def _check_operands(self, placed: Placed, item: Instruction) -> None:
        """Refuse an array that one of the cores does not have."""
        for part in item.parts:
            if part.cores is None:
                continue
            holds = np.zeros(self.mesh.cores, bool)
            holds[part.cores] = True
            missing = placed.cores[~holds[placed.cores]]
            if len(missing):
                core = int(missing[0])
                raise MeshError(
                    f"core ({core // self.mesh.columns}, {core % self.mesh.columns}), before the "
                    f"first cycle: {item.what} needs {part.name!r}, which is not on that core; "
                    "place the array there or the code elsewhere"
                )
