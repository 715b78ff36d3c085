"""`penstock train` around a trainer that only pretends: what it is given, and how it is stopped."""

import os
import signal
import sys
import types
from dataclasses import replace

import pytest
import warm_start
from events_of_a_run import started, step
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.train import GracefulStop, next_commands, timing_preparation
from penstock.errors import ConfigError
from penstock.telemetry.events import ClusterEvent, Compiling, Evaluated, Finished, Stopped


class PretendTrainer:
    """Does 100 steps at once, and stops after the step in which it was asked to."""

    on_step = staticmethod(lambda number: None)
    saved_step: int | None = None
    made: list = []  # noqa: RUF012 - the test reads what the command gave to the constructor

    def __init__(self, config, on_event, quiet):
        assert quiet, "the command shows the run itself"
        self.config, self.on_event, self.reason = config, on_event, None
        self.is_closed, self.step = False, 0
        self.model = types.SimpleNamespace(task="causal_lm")
        PretendTrainer.made.append(self)

    def request_stop(self, reason):
        self.reason = reason

    def train(self):
        self.on_event(started(self.config.run.dir, steps=100))
        for number in range(1, 101):
            PretendTrainer.on_step(number)
            self.on_event(step(number))
            self.step = number
            if self.reason:
                self.on_event(Stopped(number, self.reason, "the trainer's own idea"))
                return

    def close(self):
        self.is_closed = True


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(
        sys.modules, "penstock.training.trainer", types.SimpleNamespace(Trainer=PretendTrainer)
    )
    monkeypatch.setattr(PretendTrainer, "on_step", staticmethod(lambda number: None))
    monkeypatch.setattr(PretendTrainer, "made", [])
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "my run.yaml").write_text("model: gpt2\ndata: {input: [text.txt]}\n")
    return lambda *arguments: CliRunner().invoke(app, ["train", *arguments])


def test_trainer_receives_the_file_with_overrides(run):
    result = run("my run.yaml", "engines=2", "optimizer.learning_rate=1e-4")
    assert result.exit_code == 0
    (trainer,) = PretendTrainer.made
    config = trainer.config
    assert trainer.is_closed
    assert (config.engines, config.optimizer.learning_rate) == (2, 1e-4)
    assert str(config.run.dir) == "runs/my run"


def test_output_without_terminal_is_plain_lines(run):
    lines = run("my run.yaml", "logging.every=50").stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "1/100",
        "50/100",
        "100/100",
    ]
    assert "\x1b" not in "".join(lines)


@pytest.fixture
def minding_terminals():
    """A process that is not under nohup, though the suite may be."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")],
)
def test_first_signal_finishes_the_step_and_prints_how_to_resume(
    run, monkeypatch, minding_terminals, number, name
):
    def interrupt_at_seven(at):
        if at == 7:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(PretendTrainer, "on_step", staticmethod(interrupt_at_seven))
    before = signal.getsignal(number)
    result = run("my run.yaml", "engines=2")
    assert result.exit_code == 128 + number
    assert result.stdout.splitlines()[-2:] == [
        f"stopped after step 7: {name}",
        "resume with: penstock train 'my run.yaml' engines=2",
    ]
    assert signal.getsignal(number) is before


def test_resume_command_has_the_last_value_of_a_key_that_was_given_twice(run, monkeypatch):
    def interrupt_at_once(at):
        if at == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(PretendTrainer, "on_step", staticmethod(interrupt_at_once))
    given = ["run.steps=400", "model=gpt2", "model.n_layer=2", "run.steps=4000", "model=tiny"]
    result = run("my run.yaml", *given)
    assert result.stdout.splitlines()[-1] == (
        "resume with: penstock train 'my run.yaml' run.steps=4000 model=tiny"
    )


def test_closed_terminal_is_ignored_under_nohup(monkeypatch):
    monkeypatch.setattr(signal, "SIGHUP", signal.SIGUSR1)  # the suite itself may be under nohup
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with GracefulStop().handling(lambda reason: pytest.fail(reason)):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


IN_A_TERMINAL = """
import fcntl, signal, sys, termios, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from penstock.cli.train import GracefulStop
asked = []
with GracefulStop().handling(asked.append):
    print("ready", flush=True)
    deadline = time.monotonic() + 30
    while not asked and time.monotonic() < deadline:
        time.sleep(0.01)
print("this has no reader", flush=True)
open(sys.argv[1], "w").write(" ".join(asked))
"""


@pytest.mark.long
def test_closed_terminal_stops_the_run_and_gets_no_output(tmp_path):
    ours, theirs = os.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "asked")]
    process = warm_start.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    with open(ours, "rb", buffering=0) as terminal:
        assert b"ready" in terminal.read(100)
    assert process.wait(60) == 0
    assert (tmp_path / "asked").read_text() == "SIGHUP"


def test_interrupt_before_training_is_answered_with_a_line(run, monkeypatch, capfd):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(PretendTrainer, "__init__", interrupt)
    assert run("my run.yaml").exit_code == 130
    assert "stopped before training began\n" in capfd.readouterr().err


def test_signal_names_a_step_that_may_compile():
    """In the order in which a run that begins at step 0 and compiles in step 1, in step 2 and in
    the evaluation after step 4 tells its events."""
    evaluated = Evaluated(1, 2.0, None, 0.1, True)
    order = [
        (None, ""),
        (Compiling(0), "may"),
        (step(1), "may"),  # step 2 compiles the kernels of updates
        (evaluated, "may"),
        (step(2), ""),
        (replace(evaluated, step=2), ""),
        (step(3), ""),
        (step(4), ""),
        (Compiling(4, again=True), "may"),
        (replace(evaluated, step=4), ""),
        (Compiling(4, again=True), "may"),  # in step 5
        (step(5), "may"),
        (step(6), ""),
    ]
    shown, passed, asked = [], [], []
    stops = [GracefulStop(shown.append) for _ in order]
    listeners = [stop.watched(passed.append) for stop in stops]
    for number, (event, _) in enumerate(order):
        for listener in listeners[number:] if event is not None else ():
            listener(event)
        with stops[number].handling(asked.append):
            signal.raise_signal(signal.SIGINT)
    may = ", which may have kernels to compile"
    assert shown == [
        f"stopping after this step{may if compiles else ''}; a second signal skips the save"
        for _, compiles in order
    ]
    assert passed.count(step(6)) == 1
    assert len(asked) == len(order)


def test_the_second_signal_stops_at_once():
    stop = GracefulStop()
    asked = []
    with stop.handling(asked.append):
        signal.raise_signal(signal.SIGTERM)
        assert asked == ["SIGTERM"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == ["SIGTERM"]


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        (5, "the last saved step is 5; resume from there with: penstock train 'my run.yaml'"),
        (None, "nothing was saved: the run starts again"),
        (0, "nothing was saved: the run starts again"),  # on flash: the initial weights
    ],
)
def test_the_second_signal_tells_what_is_saved(run, monkeypatch, capfd, saved, told):
    def interrupt_twice_at_seven(at):
        if at == 7:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PretendTrainer, "on_step", staticmethod(interrupt_twice_at_seven))
    monkeypatch.setattr(PretendTrainer, "saved_step", saved)
    assert run("my run.yaml").exit_code == 130
    assert capfd.readouterr().err.endswith(f"stopped at once in step 7; {told}\n")
    assert PretendTrainer.made[0].is_closed


def test_fresh_refuses_a_non_empty_folder(run, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    result = run("my run.yaml", "run.dir=kept", "--fresh")
    assert isinstance(result.exception, ConfigError)
    assert PretendTrainer.made == []
    assert (tmp_path / "kept" / "notes.txt").read_text() == "mine"
    assert run("my run.yaml", "run.dir=new", "--fresh").exit_code == 0


@pytest.mark.parametrize(("options", "is_shown"), [(["run.steps=100"], True), ([], False)])
def test_complete_run_is_followed_by_what_can_be_done_with_it(run, options, is_shown):
    result = run("my run.yaml", "run.dir=a run", *options)
    assert result.exit_code == 0
    assert ("penstock generate 'a run'" in result.stdout) == is_shown
    assert "next:" not in run("my run.yaml", "run.dir=other", *options, "-q").stdout


def test_next_commands_suit_the_task(tmp_path):
    def commands(task):
        return next_commands(tmp_path / "run", types.SimpleNamespace(task=task))

    export = f"next: penstock export {tmp_path}/run {tmp_path}/run-exported"
    assert commands("masked_lm") == f"{export}  # a folder that transformers loads"
    assert commands("custom") == f"{export}  # its weights"
    generate, export = commands("causal_lm").splitlines()
    assert generate.startswith(f"next: penstock generate {tmp_path}/run  ")
    assert generate.index("#") == export.index("#")


def test_scaled_run_is_resumed_with_the_engines_that_it_has(run, monkeypatch):
    def scale_and_stop(number):
        (trainer,) = PretendTrainer.made
        if number == 2:
            trainer.on_event(ClusterEvent("scaled", "1 engine now", engines=1))
            trainer.on_event(ClusterEvent("slow", "engine 1001"))
            trainer.request_stop("Ctrl-C")

    monkeypatch.setattr(PretendTrainer, "on_step", staticmethod(scale_and_stop))
    result = run("my run.yaml", "engines=2", "logging.every=50")
    assert "resume with: penstock train 'my run.yaml' logging.every=50 engines=1\n" in result.stdout


def test_summary_has_the_seconds_before_the_run_starts():
    now, events = 3.0, []
    listener = timing_preparation(events.append, clock=lambda: now)
    now = 10.5
    listener(started("runs/a", steps=1))
    now = 50.0
    listener(Finished({"seconds": 39.5}, 1))
    assert events[-1].summary == {"seconds": 39.5, "preparation_seconds": 7.5}
