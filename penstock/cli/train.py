"""`penstock train`: start a run, or go on with it; stop it without losing a step."""

from __future__ import annotations

import dataclasses
import errno
import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import output
from penstock.cli.output import surviving_loss
from penstock.interruption import interrupt
from penstock.progress import show_on_stderr

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.models import ModelSource
    from penstock.progress import View
    from penstock.telemetry import Compiling, Event, Listener
    from penstock.training import Trainer


def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML file; `penstock init` writes one.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Keys to set, such as optimizer.learning_rate=3e-4."
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only notices and errors.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Refuse to resume: run.dir must be new or empty.")
    ] = False,
) -> None:
    """Train a model. A stopped run continues from its last saved step, with the same bits.

    After Ctrl-C, SIGTERM, or a closed terminal or pipe, the run finishes the step, saves, and
    prints how to resume. A second signal stops it at once: the run then resumes from its last
    complete checkpoint, or with a store on flash from its last durable step.
    """
    from penstock.config import check_run, load

    settings = load(config, overrides or (), training=True)
    check_run(settings, recorded_extra, fresh=fresh)

    from rich.console import Console

    from penstock.progress import view_for_command

    view = view_for_command(Console(), settings.logging.every, quiet)
    command = ResumeCommand(["penstock", "train", str(config)], overrides or ())
    _run(settings, view, command, names_next=not quiet)


def recorded_extra(folder: Path) -> dict[str, Any] | None:
    """Return the data kept with the last durable step of a store on flash."""
    from penstock.store import flash  # imports torch, which a refusal without a store does not need

    return flash.recorded_extra(folder)


def _run(settings: Config, view: View, resume_command: ResumeCommand, names_next: bool) -> None:
    stop = GracefulStop(view.interrupt)
    with surviving_loss(stop.lose_output):
        trainer = _train(settings, view, resume_command, stop)
        if stop.signal is None and names_next and trainer.step >= settings.run.steps:
            typer.echo(next_commands(settings.run.dir, trainer.model))
    if stop.signal is not None:
        # The exit code that a shell reports for a process ended by this signal, so that `penstock
        # train ... && next` stops after a Ctrl-C.
        raise typer.Exit(128 + stop.signal)


def _train(
    settings: Config, view: View, resume_command: ResumeCommand, stop: GracefulStop
) -> Trainer:
    """Train until the end or a signal; return the closed trainer."""
    lost = ""
    named = stop.watched(naming_command(timing_preparation(view), resume_command))
    with ExitStack() as stack:
        stack.callback(lambda: output.write_error(lost))  # after the view, whose last line is open
        try:
            stack.enter_context(view)
            from penstock.training import KernelWorker, Trainer

            worker = stack.enter_context(KernelWorker())
            worker.start(settings)
            trainer = Trainer(settings, on_event=worker.watched(named), quiet=True)
        except KeyboardInterrupt:
            output.write_error("stopped before training began\n")
            raise
        with closing(trainer), stop.handling(trainer.request_stop):
            if stop.signal is None:
                try:
                    trainer.train()
                except KeyboardInterrupt:
                    lost = stopped_at_once(trainer, resume_command)
                    raise
    return trainer


def next_commands(folder: Path, model: ModelSource) -> str:
    """Return lines with what can be done with a run that has all its steps."""
    run, out = shlex.quote(str(folder)), shlex.quote(f"{folder}-exported")
    export = f"penstock export {run} {out}"
    what = "its weights" if model.task == "custom" else "a folder that transformers loads"
    commands = [f"{export}  # {what}"]
    if model.task == "causal_lm":
        generate = f"penstock generate {run}".ljust(len(export))
        commands.insert(0, f"{generate}  # text from the trained model")
    return "next: " + "\n      ".join(commands)


class ResumeCommand:
    """The command that resumes a run: as it was typed, with the number of engines that it has now.

    A key that was set again has its last value only.

    **Arguments:** `words` are those of the command before the keys that it sets.
    """

    def __init__(self, words: Sequence[str], overrides: Sequence[str] = ()) -> None:
        self._words = words
        self._overrides: dict[str, str] = {}  # by key, in the order in which they are applied
        for text in overrides:
            self._set(text)

    def __str__(self) -> str:
        """Return a line for a shell."""
        return shlex.join([*self._words, *self._overrides.values()])

    def set_engines(self, engines: int) -> None:
        """Take the number of engines of a run that `penstock scale` has changed."""
        self._set(f"engines={engines}")

    def _set(self, text: str) -> None:
        key = text.partition("=")[0].strip()
        for old in [old for old in self._overrides if old == key or old.startswith(f"{key}.")]:
            del self._overrides[old]
        self._overrides[key] = text


def stopped_at_once(trainer: Trainer, resume_command: ResumeCommand) -> str:
    """Return a line that says from which step a run resumes that a second signal has stopped."""
    from penstock.errors import PenstockError

    is_over = trainer.step >= trainer.config.run.steps
    where = "after the last step" if is_over else f"in step {trainer.step + 1}"
    try:
        saved = trainer.saved_step
    except PenstockError as error:  # of the folder, which the next start reports again
        return f"stopped at once {where}; {error}\n"
    if not saved:
        return f"stopped at once {where}; nothing was saved: the run starts again\n"
    return (
        f"stopped at once {where}; the last saved step is {saved}; resume from there with: "
        f"{resume_command}\n"
    )


def naming_command(listener: Listener, resume_command: ResumeCommand) -> Listener:
    """Return a listener that passes events on, with the command that was really typed."""
    from penstock.telemetry import ClusterEvent, Stopped

    def pass_on(event: Event) -> None:
        if isinstance(event, ClusterEvent) and event.engines is not None:
            resume_command.set_engines(event.engines)
        if isinstance(event, Stopped):
            event = dataclasses.replace(event, resume_command=str(resume_command))
        listener(event)

    return pass_on


def timing_preparation(
    listener: Listener, clock: Callable[[], float] = time.perf_counter
) -> Listener:
    """Return a listener that passes events on, and adds the seconds between this call and the
    run's start to the summary of its end.

    **Arguments:** `clock` returns seconds.
    """
    from penstock.telemetry import Finished, RunStarted

    begun, seconds = clock(), 0.0

    def pass_on(event: Event) -> None:
        nonlocal seconds
        if isinstance(event, RunStarted):
            seconds = clock() - begun
        if isinstance(event, Finished):
            summary = {**event.summary, "preparation_seconds": seconds}
            event = dataclasses.replace(event, summary=summary)
        listener(event)

    return pass_on


class GracefulStop:
    """The first SIGINT, SIGTERM or SIGHUP requests a stop; the second raises `KeyboardInterrupt`,
    after an import that is under way (`penstock.interruption`).

    A SIGHUP that is ignored, as under `nohup`, stays ignored. A pipe that has lost its reader also
    requests a stop, as SIGPIPE would. A log whose disk is full does not: the run continues without
    the log.

    **Arguments:** `show` prints a line from within a signal handler; by default on stderr.
    """

    def __init__(self, show: Callable[[str], None] = show_on_stderr) -> None:
        self._show = show
        self.signal: int | None = None
        self._request_stop: Callable[[str], Any] | None = None
        self._compiling: Compiling | None = None  # the last one, while more kernels may follow

    def watched(self, listener: Listener) -> Listener:
        """Return a listener that passes events on; a step that may compile is then named as such.

        Compilations in the `FIRST_STEPS` steps that follow a `Compiling` have no event of their
        own. If an evaluation compiled, nothing more follows.
        """
        from penstock.telemetry import FIRST_STEPS, Compiling, Evaluated, StepDone

        def pass_on(event: Event) -> None:
            if isinstance(event, Compiling):
                self._compiling = event
            elif self._compiling is not None and isinstance(event, StepDone | Evaluated):
                begun = self._compiling.step
                is_of_evaluation = isinstance(event, Evaluated) and event.step == begun
                if is_of_evaluation or event.step >= begun + FIRST_STEPS:
                    self._compiling = None
            listener(event)

        return pass_on

    def lose_output(self, error: OSError) -> None:
        """Handle the loss of standard output, once per kind of error."""
        if error.errno != errno.EPIPE:
            output.write_error(f"note: cannot write the log: {error.strerror}; the run continues\n")
            return
        if self.signal is not None:
            return
        self.signal = signal.SIGPIPE
        output.write_error("no process reads the output: stopping after this step\n")
        if self._request_stop is not None:
            self._request_stop("no process reads the output")

    @contextmanager
    def handling(self, request_stop: Callable[[str], Any]) -> Iterator[None]:
        """Handle the signals inside the block, giving the reason; put back what was there."""

        def handle(number: int, frame: FrameType | None) -> None:
            # A dropped connection also closes the pipe, sooner or later than the signal arrives.
            if self.signal not in (None, signal.SIGPIPE):
                interrupt(number, frame)
                return
            self.signal = number
            if number == signal.SIGHUP:
                output.leave(terminals)
            may = "" if self._compiling is None else ", which may have kernels to compile"
            self._show(f"stopping after this step{may}; a second signal skips the save")
            request_stop("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)

        terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, handle) for number in numbers}
        self._request_stop = request_stop
        try:
            yield
        finally:
            self._request_stop = None
            for number, handler in previous.items():
                signal.signal(number, handler)
