"""Loading machines by name and by path, and writing them."""

from pathlib import Path

import pytest

from penstock.config import ByteSize
from penstock.errors import ConfigError
from penstock.machines import MachineDescription, dump, known_machines, load_machine
from penstock.machines.load import LIBRARY

TEXT = """\
name: rack
kind: cluster
engine:
  memory: 64GiB
  rates:
    - {work: product, sizes: [64, 1024], rates: [1e11, 3e11]}
    - {work: pointwise, rates: [1e10]}
store:
  memory: 1.5TB
  rates: [{work: update, rates: [1e10]}]
  flash:
    rates: [{work: flash read, rates: [3e9]}, {work: flash write, rates: [2.5e9]}]
link: {weights: 1.25e9, gradients: 1.25e9, fan_out: 2}
accuracy: {low: 0.9, high: 1.1, runs: 24, source: a table}
"""


@pytest.fixture
def rack(tmp_path):
    path = tmp_path / "rack.yaml"
    path.write_text(TEXT)
    return path


def test_values_of_a_file_are_those_of_the_machine(rack):
    machine = load_machine(rack)
    assert machine.name == "rack"
    assert machine.engine.memory == 64 << 30
    assert machine.store.memory == 1_500_000_000_000
    assert machine.engine.speed.curve("head").at(1 << 20) == 3e11
    assert machine.store.flash.speed.curve("flash write").at(1) == 2.5e9
    assert (machine.link.weights, machine.link.fan_out, machine.link.peers) == (1.25e9, 2, None)
    assert machine.accuracy.runs == 24


@pytest.mark.parametrize("form", [str, Path])
def test_path_is_loaded_as_text_and_as_path(rack, form, monkeypatch):
    monkeypatch.chdir(rack.parent)
    assert load_machine(form("rack.yaml")) == load_machine(form(rack))


def test_name_is_loaded_from_the_library():
    assert load_machine("cs2") == load_machine(LIBRARY / "cs2.yaml")


def test_name_of_the_library_is_not_a_file_of_the_current_folder(rack, monkeypatch):
    monkeypatch.chdir(rack.parent)
    rack.rename(rack.parent / "cs2")
    assert load_machine("cs2").name == "cs2"


def test_machine_without_a_link_is_a_host_that_computes_itself(tmp_path):
    path = tmp_path / "host.yaml"
    lines = TEXT.replace("kind: cluster", "kind: host").replace(
        "  memory: 64GiB", "  is_host: true"
    )
    path.write_text("".join(f"{line}\n" for line in lines.splitlines() if "link" not in line))
    machine = load_machine(path)
    assert machine.link is None
    assert machine.engine.memory is None


@pytest.mark.parametrize("name", known_machines())
def test_written_machine_is_read_back_equal(name, tmp_path):
    machine = load_machine(name)
    (tmp_path / "again.yaml").write_text(dump(machine))
    assert load_machine(tmp_path / "again.yaml") == machine


def test_names_that_look_like_other_types_and_exact_numbers_survive_writing(rack, tmp_path):
    machine = load_machine(rack)
    changed = machine.model_dump(mode="json") | {
        "name": "1e5",
        "title": "no: # 'ü'\n",
        "processor": "null",
        "sources": {"1:30": "true", "x": " 0x10 "},
    }
    changed["store"]["memory"] = "1000000007B"
    changed["store"]["rates"] = [{"work": "update", "rates": [1e16], "sizes": [0.1 + 0.2]}]
    changed = MachineDescription.model_validate(changed)
    (tmp_path / "again.yaml").write_text(dump(changed))
    again = load_machine(tmp_path / "again.yaml")
    assert again == changed
    assert again.name == "1e5"
    assert again.store.memory == ByteSize(1_000_000_007)
    assert again.store.rates[0].sizes == (0.1 + 0.2,)


def test_written_machine_has_each_curve_on_few_lines():
    text = dump(load_machine("h100"))
    assert "    sizes: [16.0, 240.0]\n    rates: [48000000000000.0, 720000000000000.0]\n" in text
    assert "null" not in text


def test_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(ConfigError) as raised:
        load_machine("cs22")
    assert str(raised.value) == (
        "expected a machine, cs2, cs3, h100, h200, hosts-100g, hosts-10g, hosts-25g, or the path "
        "of a machine file that ends in .yaml, got 'cs22' (did you mean 'cs2'?)"
    )


def test_missing_file_names_the_library_and_a_file_to_start_from():
    with pytest.raises(ConfigError) as raised:
        load_machine("gone.yaml")
    assert str(raised.value) == (
        "gone.yaml: no such file; give one of cs2, cs3, h100, h200, hosts-100g, hosts-10g, "
        f"hosts-25g, or start from {LIBRARY}/hosts-10g.yaml"
    )
