"""Lines that are redrawn at the bottom of a terminal leave no pieces of themselves."""

import sys
from contextlib import closing

import pytest
from events_of_a_run import started, step
from rewrapping_terminal import RewrappingTerminal
from rich.console import Console

from penstock.progress import LiveView
from penstock.progress.redrawn_lines import RedrawnLines
from penstock.telemetry.events import Notice, Stopped


@pytest.fixture
def terminal():
    return RewrappingTerminal(100)


@pytest.fixture
def console(terminal):
    class Sized(Console):
        @property
        def size(self):
            return super().size.__class__(terminal.columns, 40)

    return Sized(file=terminal, force_terminal=True, highlight=False)


@pytest.fixture(autouse=True)
def drawn_on_request(monkeypatch):
    """No thread draws beside the test."""
    monkeypatch.setattr("penstock.progress.redrawn_lines._SECONDS", 3600.0)


def opened(lines):
    lines.open()
    return lines


def borders(screen):
    return sum(row.startswith("╭") for row in screen), sum(row.startswith("╰") for row in screen)


def test_resized_terminal_shows_one_panel(terminal, console):
    terminal.write("$ penstock train x.yaml\n")
    view = LiveView(console)
    with view:
        view(started())
        for number, columns in enumerate((100, 61, 30, 100, 47, 100), start=1):
            view(step(number))
            terminal.resize(columns)
            view(Notice(f"note {number}"))
            assert borders(terminal.screen) == (1, 1), "\n".join(terminal.screen)
    assert terminal.screen[0] == "$ penstock train x.yaml"
    assert [row for row in terminal.screen if row.startswith("note")] == [
        f"note: note {number}" for number in range(1, 7)
    ]
    assert terminal.screen[-1] == ""
    assert terminal.shows_cursor
    assert terminal.wraps


def test_echoed_ctrl_c_is_overwritten_and_stop_is_shown(terminal, console):
    view = LiveView(console)
    with view:
        view(started())
        view(step(1))
        terminal.write("^C")
        view.interrupt("stopping after this step; a second signal skips the save")
        view(Notice("and so on"))
        assert borders(terminal.screen) == (1, 1)
        assert any("stopping after this step; a second" in row for row in terminal.screen)
        terminal.write("^C")
        view(Stopped(1, "Ctrl-C", "penstock train x.yaml engines=2"))
    screen = terminal.screen
    assert screen[:3] == [
        "note: and so on",
        "stopped after step 1: Ctrl-C",
        "resume with: penstock train x.yaml engines=2",
    ]
    assert borders(screen) == (1, 1)
    assert "^C" not in "".join(screen)
    assert "stopping after" not in "".join(screen)


def test_printed_text_goes_above_panel(terminal, console, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", terminal)
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        with closing(opened(RedrawnLines(console, lambda: "the last line"))):
            print("one", end=" ")
            print("and two")
            print("three\nfour")
            print("no terminal", file=sys.stderr)
            print("without an end", end="")
            assert terminal.screen == ["one and two", "three", "four", "the last line"]
        assert sys.stdout is terminal
    assert terminal.screen[-2:] == ["the last line", "without an end"]
    assert (tmp_path / "log").read_text() == "no terminal\n"


def test_lost_terminal_stops_only_drawing(terminal, console, monkeypatch):
    with closing(opened(RedrawnLines(console, lambda: "a line"))) as lines:

        def gone(text):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(terminal, "write", gone)
        lines.print("said to nobody\n")
        lines.draw()


def test_run_that_never_started_leaves_no_line(terminal, console):
    """A Ctrl-C or a refusal while the run is prepared."""
    terminal.write("$ penstock train x.yaml\n")
    with LiveView(console):
        assert terminal.screen[1] == "preparing ..."
    terminal.write("stopped before training began\n")
    assert terminal.screen[:2] == ["$ penstock train x.yaml", "stopped before training began"]


def test_interrupt_while_a_view_opens_shows_the_cursor_again(console, monkeypatch):
    view = LiveView(console)
    shown = []

    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.progress.redrawn_lines.threading.Thread", interrupted)
    monkeypatch.setattr(RedrawnLines, "_write", lambda lines, text: shown.append(text))
    with pytest.raises(KeyboardInterrupt), view:
        pass
    assert shown[0].endswith("\x1b[?25l")
    assert shown[-1].endswith("\x1b[?25h")


def test_lines_above_the_panel_are_divided_between_words_but_commands_are_not(terminal, console):
    terminal.resize(50)
    command = "penstock train configurations/one.yaml optimizer.learning_rate=0.0003"
    with LiveView(console) as view:
        view(started())
        view(Notice("there is one document, so the last 46,243 tokens are the validation split"))
        view(Notice("the host was busy: run `penstock calibrate --forget` when it is idle"))
        view(Stopped(1, "Ctrl-C", command))
    assert terminal.lines[:6] == [
        "note: there is one document, so the last 46,243",
        "  tokens are the validation split",
        "note: the host was busy: run",
        "  `penstock calibrate --forget` when it is idle",
        "stopped after step 1: Ctrl-C",
        f"resume with: {command}",
    ]


def test_last_drawing_has_all_lines_in_a_short_terminal(terminal, monkeypatch):
    console = Console(file=terminal, force_terminal=True, width=60, height=4)
    lines = RedrawnLines(console, lambda: "\n".join(map(str, range(10))))
    with closing(opened(lines)):
        assert terminal.screen == ["0", "1", "2"]
    assert terminal.screen == [*map(str, range(10)), ""]
