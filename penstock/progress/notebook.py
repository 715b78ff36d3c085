"""The view of a run in a notebook: one line that is updated in place, and permanent lines."""

import time
from collections.abc import Callable
from typing import Any

from penstock.progress.log import evaluating, event_lines, step_line
from penstock.progress.state import Progress
from penstock.progress.view import LASTING, View
from penstock.telemetry import Compiling, Evaluated, Evaluating, Event, RunStarted, StepDone

_SECONDS = 0.25  # between two updates: each is a message to the browser
_STAYS = (RunStarted, Compiling, Evaluated, *LASTING)


class NotebookView(View):
    """Shows the last step in an output of its own that IPython updates.

    **Arguments:** `display`, as `IPython.display.display`; `clock` returns seconds.
    """

    def __init__(
        self,
        display: Callable[..., Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display = display
        self._clock = clock
        self._progress = Progress(clock)
        self._handle: Any = None
        self._shown_at = 0.0
        self._is_behind = False

    def open(self) -> None:
        self._handle = None  # each call of `train` has its own output

    def close(self) -> None:
        if self._is_behind:
            self._show()

    def __call__(self, event: Event) -> None:
        self._progress = self._progress.after(event)
        if isinstance(event, StepDone):
            if self._progress.started is None:
                return  # a step outside of `train`
            self._is_behind = True
            if self._handle is None or self._clock() - self._shown_at >= _SECONDS:
                self._show()
        elif isinstance(event, Evaluating):
            if self._handle is not None and self._clock() - self._shown_at >= _SECONDS:
                self._show()
                self._is_behind = True  # until the line of the step is shown again
        elif isinstance(event, _STAYS):
            for line in event_lines(event, self._progress.loss_unit):
                print(line)

    def interrupt(self, text: str) -> None:
        """Print that a stop was requested."""
        print(text)

    def _show(self) -> None:
        text = step_line(self._progress)
        if self._progress.evaluating is not None:
            text += f"  {evaluating(self._progress)}"
        content = {"text/plain": text}
        if self._handle is None:
            self._handle = self._displayed(content)
        else:
            self._handle.update(content, raw=True)
        self._shown_at, self._is_behind = self._clock(), False

    def _displayed(self, content: dict[str, str]) -> Any:
        display = self._display
        if display is None:
            from IPython.display import display  # type: ignore[no-redef]

            self._display = display
        assert display is not None
        return display(content, raw=True, display_id=True)
