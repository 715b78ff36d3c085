"""`penstock scale` where there is nothing to scale: what is said, and with which exit code."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from penstock.cli.scale import scale
from penstock.distributed import control
from penstock.distributed.control import admin_client
from penstock.distributed.control.admin_client import Scaled
from penstock.distributed.rendezvous_file import NAME, write_record
from penstock.errors import ClusterError, ConfigError, ProtocolError


def test_invalid_number_of_engines_is_refused(tmp_path):
    texts = ("8", "engines", "engines=", "engines=0", "engines=-1", "engine=8", "engines=x")
    for text in (*texts, "relays=-1", "relays=auto"):
        expected = "expected engines=NUMBER, 1 or more, or relays=NUMBER, 0 or more, got"
        with pytest.raises(ConfigError, match=expected):
            scale(tmp_path, ["engines=2", text])


def test_missing_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no such run; expected the folder that run\.dir named"):
        scale(tmp_path / "nothing", ["engines=8"])


def test_run_without_cluster_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cluster\.start other than none.*engines=8"):
        scale(tmp_path, ["engines=8"])


def test_malformed_rendezvous_file_is_refused(tmp_path):
    for text in ("", "[]", '{"address": "here", "token": 1}', "x" * 5000):
        (tmp_path / NAME).write_text(text)
        with pytest.raises(ConfigError, match="expected the rendezvous file of a run"):
            scale(tmp_path, ["engines=8"])


@pytest.mark.parametrize("port", [0, -1, 65536, 70000, True, 80.0, "80"])
def test_port_that_does_not_exist_is_refused(tmp_path, port):
    """A port of 65536 + 80 would be that of another program: the system takes it for 80."""
    (tmp_path / NAME).write_text(json.dumps({"address": ["127.0.0.1", port], "token": "a token"}))
    with pytest.raises(ConfigError, match=r"a port from 1 to 65535"):
        scale(tmp_path, ["engines=8"])


def test_rendezvous_file_of_a_killed_run_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    write_record(tmp_path, address, "a token")
    with pytest.raises(ClusterError, match=r"the run is not training now.*Connection refused"):
        scale(tmp_path, ["engines=8"])


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (Scaled(1, 4, 0, 0), "RUN: 1 engine now, 4 from the next step\n"),
        (
            Scaled(2, 1, 1, 0),
            "RUN: 2 engines now, 1 from the next step\nRUN: 1 relay now, 0 from the next step\n",
        ),
    ],
)
def test_numbers_are_told_in_words_that_agree_with_them(monkeypatch, capsys, done, said):
    monkeypatch.setattr(control, "scale", lambda *_: done)
    scale(Path("RUN"), ["engines=4"])
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (Scaled(1, 1, 0, 0, 0), "my run: 1 engine wanted, 0 ready; "),
        (
            Scaled(4, 4, 2, 2, 2, 1),
            "my run: 4 engines wanted, 2 ready; 2 relays wanted, 1 ready; ",
        ),
    ],
)
def test_wanted_and_ready_numbers_are_told_with_the_command_that_changes_them(
    monkeypatch, capsys, now, said
):
    asked = []

    def order(*arguments):
        asked.append(arguments)
        return now

    monkeypatch.setattr(control, "scale", order)
    scale(Path("my run"))
    usage = "to change: penstock scale 'my run' engines=NUMBER\n"
    assert capsys.readouterr().out == said + usage
    assert asked == [(Path("my run"), None, None)]


def test_answer_of_an_older_run_names_the_version(tmp_path, monkeypatch):
    write_record(tmp_path, ("127.0.0.1", 1), "a token")
    told = {"error": "engines: expected 1 to 8 (one micro-batch each), got None"}
    monkeypatch.setattr(admin_client, "_request", lambda *_: told)
    with pytest.raises(ConfigError, match=r"got None; does the run use the same version of Pen"):
        scale(tmp_path)
    with pytest.raises(ConfigError, match=r"got None$"):
        scale(tmp_path, ["engines=9"])
    told = {"before": 2, "engines": 2, "relays_before": 0, "relays": 0}
    with pytest.raises(ProtocolError, match=r"expected the numbers of engines and relays"):
        scale(tmp_path)


def test_run_without_cluster_has_no_number_to_tell(tmp_path):
    with pytest.raises(ConfigError, match=r"give engines=NUMBER to penstock train"):
        scale(tmp_path)
