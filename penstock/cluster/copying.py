"""Giving a process what another one holds of a shard: all weights, all state, and what is kept.

The values go through the process that asks, a piece at a time: while one is written, the next is
read. All come from one node, which stands at one step the whole time, so that nothing is mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.cluster.calls import Asked, Calls, ShardLostError
from penstock.errors import ClusterError, PenstockError
from penstock.store import Holding
from penstock.store.holding import homes

PIECE_BYTES = 16 << 20
_WIDTHS = {"float32": 4, "uint8": 1}


class NotTakenError(ClusterError):
    """The process that was to be given a copy could not take it."""


@dataclass(frozen=True)
class _Piece:
    name: str
    role: str
    begin: int
    end: int
    size: int


def copy_shard(
    calls: Calls, holding: Holding, source: int, target: int, check: Callable[[], None]
) -> int:
    """Give node `target` all that node `source` holds, while it stands still.

    Args:
        holding: what of the program it is.
        check: is called between two pieces; may raise, to give up.

    Returns:
        The bytes that were copied.

    Raises:
        ShardLostError: either was lost.
        NotTakenError: `target` cannot hold it.
        PenstockError: `source` cannot say what it holds.
    """
    status = calls.ask(source, "status", {}, {}).body
    _give(calls.begin(target, "begin_restore", {}, {}))
    copied, writing = 0, None
    for piece in _pieces(calls, holding, source):
        check()
        reading = calls.begin(
            source,
            "read",
            {"name": piece.name, "role": piece.role, "begin": piece.begin, "end": piece.end},
            {},
            most=piece.size,
        )
        values = reading.answer()
        if values.body["step"] != status["step"]:
            raise ClusterError(
                f"node {source} went from step {status['step']} to step {values.body['step']} "
                "while it was copied"
            )
        if writing is not None:
            _give(writing)
        where = {"name": piece.name, "role": piece.role, "begin": piece.begin}
        writing = calls.begin(target, "write", where, values.arrays)
        copied += piece.size
    if writing is not None:
        _give(writing)
    _give(calls.begin(target, "remember", {"extra": status.get("extra", {})}, {}))
    _give(calls.begin(target, "finish_restore", {"step": status["step"]}, {}))
    return copied


def _pieces(calls: Calls, holding: Holding, source: int) -> Iterator[_Piece]:
    """Yield all that there is of every weight, in the order of the stages."""
    for name in homes(holding):
        roles = calls.ask(source, "roles", {"name": name}, {}).body["roles"]
        for role, (kind, shape) in roles.items():
            width, count = _WIDTHS[kind], math.prod(shape)
            most = PIECE_BYTES // width
            for begin in range(0, count, most):
                end = min(begin + most, count)
                yield _Piece(name, role, begin, end, (end - begin) * width)


def _give(asked: Asked) -> None:
    try:
        asked.answer()
    except ShardLostError:
        raise
    except PenstockError as error:
        raise NotTakenError(str(error)) from error
