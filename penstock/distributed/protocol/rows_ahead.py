"""The rows of the next step, which engines receive while the step in flight runs.

So the rows of all engines need not pass the trainer's link before a step can begin. Rows count only
in the epoch in which they were sent; in another epoch they are sent again with BEGIN. An engine
whose rows were lost does not begin, and the step is retried in another epoch.
"""

from collections.abc import Sequence

from penstock.distributed.protocol.messages import MessageType
from penstock.distributed.protocol.step_request import EngineInput, StepRequest
from penstock.distributed.protocol.step_transaction import Send, packed_rows


class RowsAhead:
    """Sends the rows of one step before it begins.

    Args:
        send: sends a message to a node.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._epoch = 0
        self._request: StepRequest | None = None
        self._parts: Sequence[EngineInput] = ()

    def send(self, request: StepRequest, epoch: int, engines: Sequence[int]) -> None:
        """Send the rows of a step to the engines of an epoch.

        An error of the data is left to the step itself, which asks for the rows again.
        """
        self._request = None
        try:
            parts = request.parts(len(engines))
            packed = [packed_rows(part, request.step) for part in parts]
        except Exception:  # the step ends with this error when it begins
            return
        self._epoch, self._request = epoch, request
        self._parts = [EngineInput(part.body, {}) for part in parts]
        for engine, (described, payload) in zip(engines, packed, strict=True):
            self._send(engine, MessageType.ROWS, {"rows": described}, payload, request.step)

    def of(self, request: StepRequest, epoch: int) -> Sequence[EngineInput] | None:
        """Return the engines' input without rows, if their rows were sent in this epoch."""
        was_sent = request is self._request and epoch == self._epoch
        return self._parts if was_sent else None
