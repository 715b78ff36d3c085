"""The peak of an engine's memory over a step of any number of micro-batches, from a short dry run.

The engine does the same with each micro-batch. Only the first and the last differ, since they hold
and release what all share. So a dry run with three micro-batches is recorded, and the second one
counts for all others. The sums of gradients depend on the number: how many wait in the tree follows
from `collectives.TreeReduction` itself. The result equals that of a dry run with all micro-batches,
which would take minutes for deep programs.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from penstock.collectives import PartialSum, TreeReduction
from penstock.engine.flow import Flow
from penstock.engine.interface import Batch, EnginePlan, PendingGradients
from penstock.engine.memory import MemoryAccount
from penstock.engine.null_engine import NullEngine, run_step
from penstock.program import Program, Stage

_RECORDED = 3  # micro-batches: the first, one for all between, and the last


@dataclass(frozen=True)
class _Top:
    """The most bytes that are in use at once, above those at the begin of a section, and for what;
    of equal ones the first."""

    bytes: int
    what: str


@dataclass(frozen=True)
class _Addition:
    """The gradients of a micro-batch become part of the sum over micro-batches.

    `at` are the bytes in use then, above those at the begin of the section. The gradients have
    `leaf` bytes, once added to others `summed`; the addition itself takes `wider` bytes more.
    """

    at: int
    leaf: int
    summed: int
    wider: int
    what: str


@dataclass
class _Section:
    """A part of an operation, for one micro-batch or for none.

    `number` is that of the recorded micro-batch, and `begin` the bytes in use at the begin. `tops`
    are those before and after the addition, if there is one. `grown` is by how much the bytes in
    use grow. `sends` says that the sum is sent at its end.
    """

    number: int | None
    begin: int
    tops: list[_Top | None] = field(default_factory=lambda: [None])
    addition: _Addition | None = None
    grown: int = 0
    sends: bool = False


class StepMemory:
    """Predicts the peak of a step's memory from the record of a few micro-batches.

    **Arguments:** as those of `null_engine.dry_run`.
    """

    def __init__(self, program: Program, plan: EnginePlan, expands_sparse: bool = False) -> None:
        self._record = functools.partial(_recorded, program, plan, expands_sparse)
        self._records: dict[int, list[_Section]] = {}  # by the number of micro-batches
        self._peaks: dict[int, tuple[int, str]] = {}

    def peak(self, micro_batches: int) -> tuple[int, str]:
        """Return the peak in bytes of a step of so many micro-batches, and the stage there."""
        if micro_batches not in self._peaks:
            recorded = min(micro_batches, _RECORDED)
            if recorded not in self._records:
                self._records[recorded] = self._record(recorded)
            self._peaks[micro_batches] = _peak(self._records[recorded], micro_batches)
        return self._peaks[micro_batches]


def _recorded(
    program: Program, plan: EnginePlan, expands_sparse: bool, micro_batches: int
) -> list[_Section]:
    engine = _RecordedEngine(program, plan, expands_sparse=expands_sparse)
    run_step(engine, micro_batches)
    return engine.record.end()


def _peak(sections: Sequence[_Section], micro_batches: int) -> tuple[int, str]:
    peak, what = 0, ""
    held = sent = summed = 0
    for section in sections:
        numbers = _numbers(section, micro_batches)
        waiting = _waiting_bytes(section.addition, micro_batches)
        top = _highest(section, len(numbers), waiting[numbers.start : numbers.stop + 1])
        base = held + sent + (summed if section.addition is None else 0)
        if top is not None and base + top.bytes > peak:
            peak, what = base + top.bytes, top.what
        held += len(numbers) * section.grown
        if section.addition is not None:
            summed = int(waiting[numbers.stop])
        if section.sends:
            sent, summed = summed, 0
    return peak, what


def _numbers(section: _Section, micro_batches: int) -> range:
    """Return the micro-batches for which a section stands; a single one if it is for none."""
    if section.number is None:
        return range(1)
    if section.number == 0 or micro_batches < _RECORDED:
        return range(section.number, section.number + 1)
    last = micro_batches - 1
    return range(1, last) if section.number == 1 else range(last, micro_batches)


def _highest(section: _Section, times: int, waiting: np.ndarray) -> _Top | None:
    """Return the first of the highest tops of all repetitions, above the begin of the first.

    **Arguments:** `waiting` are the bytes of the sums before each repetition, and after the last.
    """
    addition, grown = section.addition, section.grown
    if addition is None:
        [top] = section.tops
        if top is None:
            return None
        return _Top(top.bytes + max(0, (times - 1) * grown), top.what)
    before, after = waiting[:-1], waiting[1:]
    columns = [
        (before + addition.at + addition.leaf + addition.wider * (before > 0), addition.what),
        (after + addition.at, addition.what),
    ]
    first, last = section.tops
    if first is not None:
        columns.insert(0, (before + first.bytes, first.what))
    if last is not None:
        columns.append((after + last.bytes, last.what))
    table = np.stack([values for values, _ in columns], axis=1)
    table += grown * np.arange(times)[:, None]
    place = int(table.argmax())  # in the order of time, so the first of equal ones
    return _Top(int(table.flat[place]), columns[place % len(columns)][1])


def _waiting_bytes(addition: _Addition | None, leaves: int) -> np.ndarray:
    """Return the bytes of all sums after each number of additions, from none to all."""
    if addition is None:
        return np.zeros(0, np.int64)
    single, summed = _waiting_sums(leaves)
    return single * addition.leaf + summed * addition.summed


@functools.lru_cache(maxsize=64)
def _waiting_sums(leaves: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many single gradients and how many sums wait in the tree after each number of
    additions, from none to all."""
    total, found = TreeReduction(leaves), [(0, 0)]
    leaf = torch.empty(0, dtype=torch.bfloat16, device="meta")  # sums are float32
    for number in range(leaves):
        total.add(PartialSum(0, number, (leaf,)))
        nodes = [node.tensors[0] for node in total.nodes()]
        single = sum(tensor is not None and tensor.dtype == leaf.dtype for tensor in nodes)
        found.append((single, len(nodes) - single))
    single_counts, sum_counts = np.array(found, np.int64).T
    return single_counts, sum_counts


class _Record(MemoryAccount):
    """A memory account that notes its sections; sums of gradients are no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self._sections = [_Section(None, 0)]

    def begin(self, number: int | None) -> None:
        """Begin a section, for a micro-batch or for none."""
        self._close()
        self._sections.append(_Section(number, self.current_bytes))

    def end(self) -> list[_Section]:
        """Return the sections that change or need memory."""
        self._close()
        return [s for s in self._sections if s.grown or s.sends or any(s.tops) or s.addition]

    def peak(self, transient_bytes: int, what: str) -> None:
        """Note that so many more bytes are in use during a call."""
        super().peak(transient_bytes, what)
        section = self._sections[-1]
        total, top = self.current_bytes + transient_bytes - section.begin, section.tops[-1]
        if top is None or total > top.bytes:
            section.tops[-1] = _Top(total, what)

    def add(self, leaf: PartialSum, what: str) -> None:
        """Note the addition of gradients."""
        section = self._sections[-1]
        assert section.addition is None
        tensors = [tensor for tensor in leaf.tensors if tensor is not None]
        section.addition = _Addition(
            self.current_bytes - section.begin,
            sum(tensor.nbytes for tensor in tensors),
            sum(4 * tensor.numel() for tensor in tensors),
            sum(4 * tensor.numel() for tensor in tensors if tensor.itemsize < 4),
            what,
        )
        section.tops.append(None)

    def send(self) -> None:
        """Note that the sums are sent."""
        self._sections[-1].sends = True
        self.begin(None)

    def _close(self) -> None:
        section = self._sections[-1]
        section.grown = self.current_bytes - section.begin


class _RecordedEngine(NullEngine):
    """A null engine that records its memory."""

    def __init__(self, program: Program, plan: EnginePlan, *, expands_sparse: bool) -> None:
        super().__init__(program, plan, expands_sparse=expands_sparse)
        self.memory = self.record = _Record()

    def _new_flows(self, batch: Batch) -> list[Flow]:
        """Return the values of each micro-batch; each loop over them is a section."""
        noted = replace(batch, micro_batches=_Noted(batch.micro_batches, self.record))
        return _Noted(super()._new_flows(noted), self.record)

    def _add(self, total: TreeReduction, leaf: PartialSum, place: Stage) -> None:
        self.record.add(leaf, place.name)

    def _finish(self, stage: int, total: TreeReduction) -> PendingGradients:
        self.record.send()
        return self._send(stage, total.nodes())


class _Noted(list[Any]):
    """A list that tells the record when a loop over it takes an element, and when it ends."""

    def __init__(self, items: Sequence[Any], record: _Record) -> None:
        super().__init__(items)
        self._record = record

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(super().__iter__()):
            self._record.begin(number)
            yield item
        self._record.begin(None)
