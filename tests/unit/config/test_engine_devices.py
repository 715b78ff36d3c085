"""`engine.devices`: which groups of devices a configuration may ask for."""

import pytest

from penstock.config import Config, load, trajectory
from penstock.errors import ConfigError


def config(engine, **keys):
    return Config.from_mapping({"model": "gpt2", "engine": engine, **keys})


@pytest.mark.parametrize(
    "devices", [None, "all", ["cuda:0"], ["cuda:0", "cuda:3"], ["cpu"], ["cpu", "cpu"]]
)
def test_devices_are_all_gpus_or_a_list_of_one_kind(devices):
    made = config({"devices": devices})
    assert made.engine.devices == (tuple(devices) if isinstance(devices, list) else devices)
    assert Config.from_mapping(made.to_mapping()) == made


def test_devices_can_be_set_on_the_command_line():
    made = Config.from_mapping({"model": "gpt2"}, ["engine.devices=[cuda:0, cuda:1]"])
    assert made.engine.devices == ("cuda:0", "cuda:1")
    assert Config.from_mapping({"model": "gpt2"}, ["engine.devices=all"]).engine.devices == "all"


def test_devices_do_not_decide_the_result():
    assert trajectory(config({"devices": ["cpu", "cpu"]})) == trajectory(config({}))


@pytest.mark.parametrize(
    ("engine", "keys", "text"),
    [
        (
            {"devices": "al"},
            {},
            "engine.devices: expected all, null or a list such as [cuda:0, cuda:1], got 'al'",
        ),
        (
            {"devices": ["cpu", 2]},
            {},
            "engine.devices: expected all, null or a list such as [cuda:0, cuda:1], got ['cpu', 2]",
        ),
        ({"devices": []}, {}, "engine.devices: expected at least one device, got an empty list"),
        (
            {"devices": ["cuda"]},
            {},
            "engine.devices: expected cpu, or cuda:0 and the like, got 'cuda'",
        ),
        (
            {"devices": ["cpu", "cuda:0"]},
            {},
            "engine.devices: expected devices of one kind, got cpu, cuda:0; CPU and GPU round "
            "differently, so a run has one kind",
        ),
        (
            {"devices": ["cuda:1", "cuda:0", "cuda:1"]},
            {},
            "engine.devices: expected each GPU once, got cuda:1 again",
        ),
        (
            {"devices": ["cpu", "cpu"], "device": "cuda"},
            {},
            "engine.device: expected auto with engine.devices: cpu ..., got cuda",
        ),
        (
            {"devices": "all", "device": "cpu"},
            {},
            "engine.device: expected auto or cuda with engine.devices: all, got cpu",
        ),
        (
            {"devices": ["cpu", "cpu"]},
            {"engines": 3},
            "engines: expected 2, one per device of engine.devices, got 3; leave it out",
        ),
        (
            {"devices": "all"},
            {"engines": 3},
            "engines: expected 1 with engine.devices: all, which makes one per GPU, got 3; leave "
            "it out",
        ),
        (
            {"devices": ["cpu", "cpu"]},
            {"batch": {"size": 1, "micro": 1}},
            "engine.devices: expected at most batch.size 1 devices, got 2; each needs a sequence",
        ),
        (
            {"devices": ["cpu", "cpu"]},
            {"cluster": {"start": "local"}},
            "engine.devices: expected null with cluster.start: local, whose engines have a device "
            "each; set engines to their number",
        ),
    ],
)
def test_invalid_devices_are_refused_with_the_expected_form(engine, keys, text):
    with pytest.raises(ConfigError) as caught:
        config(engine, **keys)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (
            "0x32",
            "50; if 0x32 was written: YAML reads 0x32 as a hexadecimal number, quote it; and give "
            "it rows from 1 up",
        ),
        ("'0x32'", "'0x32', which has no cores"),
        ("8x0", "'8x0', which has no cores"),
        ("0x1f", "31"),
        ("true", "True"),
    ],
)
def test_mesh_that_yaml_reads_as_a_number_or_without_cores_is_explained(written, text, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: gpt2\nengine:\n  device: wafer\n  mesh: {written}\n")
    with pytest.raises(ConfigError) as error:
        load(path)
    [line] = [line for line in str(error.value).splitlines() if "engine.mesh" in line]
    wanted = "engine.mesh: expected rows and columns from 1 up, such as 32x32, got "
    assert line.endswith(wanted + text)
