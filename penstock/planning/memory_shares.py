"""The division of a machine's memory between the parts of a run."""

from dataclasses import dataclass

from penstock.config import size_above
from penstock.errors import BudgetError


@dataclass(frozen=True)
class MemoryShares:
    """The memory of the parts of the process, in bytes.

    `engine` is the budget of one engine that trains. `engine_peak` is its expected use, and
    `engine_host` its use of host memory. `engines` is the memory of this host that all its engines
    use together. `engine_most` is the host memory that one engine may take with the free pages that
    it keeps (`kept_pages.py`), at most twice its use. `inference` is the budget of an engine that
    evaluates or generates while no other computes in this process. `limit` is the memory of all
    parts together while no checkpoint is written. `mask_change` is the part of `store` that only a
    step that changes masks takes. `early` is the part of `store` for weights that are streamed
    before their update; 0 where none are, or where memory does not suffice.
    """

    engine: int
    engine_peak: int
    engine_host: int
    engines: int
    store: int
    engine_most: int
    inference: int
    limit: int
    mask_change: int = 0
    early: int = 0


@dataclass(frozen=True)
class HostCapacity:
    """The memory for engines on this machine: a limit, and the fixed memory of the other parts.

    `engine` is the memory of one engine, its process included.
    """

    limit: int
    others: int
    engine: int

    def require(self, engines: int) -> None:
        """**Raises:** `BudgetError` if the memory is too small for this number of engines."""
        need = self.others + engines * self.engine
        if need <= self.limit:
            return
        most = max(0, self.limit - self.others) // self.engine
        raise BudgetError(
            f"engines: {engines} on this machine need {engines} x {size_above(self.engine)} beside "
            f"the {size_above(self.others)} of the other parts, {size_above(need)} in all; the "
            f"limit is {size_above(self.limit)}: there is room for {most}"
        )
