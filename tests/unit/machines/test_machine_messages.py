"""What an impossible machine file is answered with, to the letter."""

import pytest

from penstock.errors import ConfigError
from penstock.machines import load_any, load_machine
from penstock.machines.load import LIBRARY

GOOD = """\
name: rack
kind: cluster
engine:
  most: 4
  memory: 64GiB
  rates:
    - work: product
      sizes: [64, 1024]
      rates: [1e11, 3e11]
    - {work: pointwise, rates: [1e10]}
store:
  memory: 1TiB
  rates: [{work: update, rates: [1e10]}]
link:
  weights: 1.25e9
  gradients: 1.25e9
accuracy: {low: 0.9, high: 1.1, runs: 24, source: a table}
"""
ENGINE_KEYS = (
    "most, is_host, memory, micro_batch_tokens, operator_seconds, stage_seconds, "
    "float32_in_step, bfloat16_in_step, rates, watts, price"
)
LINK_KEYS = "weights, gradients, store, fan_out, peers, seconds, value_bytes"
CURVE_KEYS = "work, dtype, layout, sizes, rates, spread"
ENGINE_WORK = (
    "product, sparse product, attention, head, norm, activation, pointwise, reduction, lookup, copy"
)


def message(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_machine("m.yaml")
    return str(raised.value)


def test_the_file_that_the_others_change_is_a_machine(tmp_path):
    (tmp_path / "m.yaml").write_text(GOOD)
    assert load_machine(tmp_path / "m.yaml").engine.most == 4


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "most: 4",
            "most: 0",
            "m.yaml:4: engine.most: expected a number from 1 up, got 0; for example engine.most: 8",
        ),
        (
            "rates: [1e11, 3e11]",
            "rates: [1e11, -3e11]",
            "m.yaml:9: engine.rates[0].rates: expected numbers above 0, got -3e+11; correct or "
            "remove it",
        ),
        (
            "rates: [1e11, 3e11]",
            "rates: [0, 3e11]",
            "m.yaml:9: engine.rates[0].rates: expected numbers above 0, got 0; correct or remove "
            "it",
        ),
        (
            "rates: [1e11, 3e11]",
            "rates: [1e-300, 3e11]",
            "m.yaml:9: engine.rates[0].rates: expected rates of 1 FLOP/s or more, got 1e-300; "
            "correct or remove it",
        ),
        (
            "rates: [1e10]}\nstore",
            "rates: [0.5]}\nstore",
            "m.yaml:10: engine.rates[1].rates: expected rates of 1 bytes/s or more, got 0.5; "
            "correct or remove it",
        ),
        (
            "memory: 64GiB",
            "memory: 64GiB\n  operator_seconds: 1e300",
            "m.yaml:6: engine.operator_seconds: expected a number up to 1e+06, got 1.0e+300; "
            "for example engine.operator_seconds: 5.0e-06 (s)",
        ),
        (
            "gradients: 1.25e9",
            "gradients: 1e-300",
            "m.yaml:16: link.gradients: expected a number from 1 up, got 1.0e-300; for "
            "example link.gradients: 12500000000.0 (bytes/s)",
        ),
        (
            "rates: [1e11, 3e11]",
            "rates: [1e11, .nan]",
            "m.yaml:9: engine.rates[0].rates[1]: expected a finite number, got .nan; for example "
            "engine.rates.rates: [200000000000.0, 400000000000.0, 500000000000.0]",
        ),
        (
            "sizes: [64, 1024]",
            "sizes: [1024, 64]",
            "m.yaml:8: engine.rates[0].sizes: expected ascending sizes, got 1024, 64; order sizes "
            "and rates alike, each size once",
        ),
        (
            "sizes: [64, 1024]",
            "sizes: [64]",
            "m.yaml:9: engine.rates[0].rates: expected one rate per size, got 2 for 1; add or "
            "remove some",
        ),
        (
            "work: product\n",
            "work: sparse product\n      dtype: float32\n",
            "m.yaml:9: engine.rates[0].sizes: expected shares of kept entries up to 1 for a sparse "
            "product, got 1024; write 0.1 for 10 %",
        ),
        (
            "work: product\n",
            "work: attention\n",
            "m.yaml:6: engine.rates: expected a curve of work 'product', got none; add "
            "{work: product, rates: [...]}",
        ),
        (
            "work: product\n",
            "work: produkt\n",
            f"m.yaml:7: engine.rates[0].work: expected one of {ENGINE_WORK}, update, receive, "
            "checksum, flash read, flash write, shared memory, socket, got 'produkt' (did you mean "
            "'product'?)",
        ),
        (
            "  rates: [{work: update, rates: [1e10]}]",
            "  rates: [{work: update, rates: [1e10]}, {work: product, rates: [1e10]}]",
            "m.yaml:13: store.rates[1].work: expected one of update, receive, copy, checksum, got "
            "'product'; remove the curve, or move it to the part that does such work",
        ),
        (
            "    - {work: pointwise, rates: [1e10]}\n",
            "    - {work: pointwise, rates: [1e10]}\n    - {work: pointwise, rates: [2e10]}\n",
            "m.yaml:11: engine.rates[2]: expected one curve of work 'pointwise', dtype 'any' and "
            "layout 'any', got rates[1] as well; keep one",
        ),
        (
            "store:\n",
            "store:\n  flash: {rates: [{work: flash read, rates: [1e9]}]}\n",
            "m.yaml:12: store.flash.rates: expected a curve of work 'flash write', got none; add "
            "{work: flash write, rates: [...]}",
        ),
        (
            "link:\n  weights: 1.25e9\n  gradients: 1.25e9\n",
            "",
            "m.yaml: link: missing; an engine that is not the host needs a link to the store. Add "
            "link: {weights: ..., gradients: ...} in bytes/s, or set engine.is_host: true",
        ),
        (
            "  memory: 64GiB\n",
            "",
            "m.yaml:3: engine.memory: missing; an engine that is not the host has its own. Add for "
            "example engine.memory: 40GB, or set engine.is_host: true",
        ),
        (
            "most: 4",
            "is_host: true",
            "m.yaml:5: engine.memory: expected null for an engine that is the host "
            "(engine.is_host: true), which computes in store.memory; remove engine.memory, or set "
            "engine.is_host: false\n"
            "m.yaml:14: link: expected null for an engine that is the host (engine.is_host: true); "
            "remove link, or set engine.is_host: false",
        ),
        (
            "[{work: update, rates: [1e10]}]",
            "[{work: update, rates: []}]",
            "m.yaml:13: store.rates[0].rates: expected a list of at least 1, got []; for example "
            "store.rates.rates: [200000000000.0, 400000000000.0, 500000000000.0]",
        ),
        (
            "[{work: update, rates: [1e10]}]",
            "[{work: update, rates: [.nan]}]",
            "m.yaml:13: store.rates[0].rates[0]: expected a finite number, got .nan; for example "
            "store.rates.rates: [200000000000.0, 400000000000.0, 500000000000.0]",
        ),
        ("  memory: 1TiB\n", "", "m.yaml:11: store.memory: missing key; add it"),
        (
            "memory: 1TiB",
            "memory: 0",
            "m.yaml:12: store.memory: expected a size such as 4GiB, 512MiB or 2GB, got 0; it must "
            "be at least one byte",
        ),
        (
            "weights: 1.25e9",
            "weights: 0",
            "m.yaml:15: link.weights: expected a number from 1 up, got 0; for example "
            "link.weights: 12500000000.0 (bytes/s)",
        ),
        (
            "weights: 1.25e9",
            "weights: fast",
            "m.yaml:15: link.weights: expected a number, got 'fast'; for example "
            "link.weights: 12500000000.0 (bytes/s)",
        ),
        (
            "  gradients: 1.25e9\n",
            "  gradients: 1.25e9\n  fan_out: 2\n  peers: 1e9\n",
            "m.yaml:18: link.peers: expected null beside fan_out, since weights reach an engine by "
            "one way; remove one of the two",
        ),
        (
            "weights: 1.25e9",
            "wieghts: 1.25e9",
            f"m.yaml:14: link.weights: missing key; add it\nm.yaml:15: link.wieghts: unknown key "
            f"(did you mean 'weights'?); link has {LINK_KEYS}",
        ),
        (
            "      sizes: [64, 1024]",
            "      size: [64, 1024]",
            f"m.yaml:8: engine.rates[0].size: unknown key (did you mean 'sizes'?); engine.rates[0] "
            f"has {CURVE_KEYS}",
        ),
        (
            "name: rack\n",
            "name: rack\nwatts: 3\n",
            "m.yaml:2: watts: unknown key (did you mean 'engine.watts' or 'store.watts'?); a "
            "machine has name, title, kind, processor, engine, store, link, processes, accuracy, "
            "sources",
        ),
        (
            "name: rack\n",
            "name: rack\nlr: 3\n",
            "m.yaml:2: lr: unknown key; a machine has name, title, kind, processor, engine, store, "
            "link, processes, accuracy, sources",
        ),
        ("name: rack", "name: 3", "m.yaml:1: name: expected a text, got 3; for example name: rack"),
        (
            "kind: cluster",
            "kind: wafre",
            "m.yaml:2: kind: expected one of host, cluster, wafer, got 'wafre' (did you mean "
            "'wafer'?)",
        ),
        (
            "accuracy: {low: 0.9, high: 1.1,",
            "accuracy: {low: 1.2, high: 1.1,",
            "m.yaml:17: accuracy.low: expected at most high (1.1), got 1.2; exchange the two",
        ),
        (
            "accuracy: {low: 0.9, high: 1.1, runs: 24,",
            "accuracy: {low: 0.9, high: 1.1, runs: 0,",
            "m.yaml:17: accuracy.runs: expected a number from 1 up, got 0; for example "
            "accuracy.runs: 24",
        ),
        (
            "link:\n  weights: 1.25e9\n  gradients: 1.25e9\n",
            "link: [1.25e9, 1.25e9]\n",
            "m.yaml:14: link: expected a mapping, got [1250000000.0, 1250000000.0]; it has the "
            f"keys {LINK_KEYS}",
        ),
        (
            "  rates: [{work: update, rates: [1e10]}]",
            "  rates: 1e10",
            "m.yaml:13: store.rates: expected a list, got 10000000000.0; each item has the keys "
            f"{CURVE_KEYS}",
        ),
        (
            "  rates: [{work: update, rates: [1e10]}]",
            "  rates: [1e10]",
            "m.yaml:13: store.rates[0]: expected a mapping, got 10000000000.0; it has the keys "
            f"{CURVE_KEYS}",
        ),
        (
            "name: rack\n",
            "name: rack\nsources: {engine.most: 8}\n",
            "m.yaml:2: sources.engine.most: expected a text, got 8; for example "
            "sources: {engine.memory: data sheet of 2024}",
        ),
    ],
)
def test_impossible_machine_is_explained(tmp_path, monkeypatch, old, new, expected):
    assert GOOD.count(old) == 1, "the change must be one change"
    assert message(tmp_path, monkeypatch, GOOD.replace(old, new)) == expected


def test_engine_that_is_a_list_is_explained(tmp_path, monkeypatch):
    text = "name: a\nkind: host\nengine: [1]\nstore: 3\n"
    assert message(tmp_path, monkeypatch, text).splitlines() == [
        f"m.yaml:3: engine: expected a mapping, got [1]; it has the keys {ENGINE_KEYS}",
        "m.yaml:4: store: expected a mapping, got 3; it has the keys memory, cores, rates, flash, "
        "watts, price",
    ]


def test_problems_of_all_parts_are_given_at_once_in_the_order_of_the_file(tmp_path, monkeypatch):
    text = GOOD
    for old, new in (
        ("most: 4", "most: -1"),
        ("sizes: [64, 1024]", "sizes: [64, 0]"),
        ("memory: 1TiB", "memory: 1TX"),
        ("weights: 1.25e9", "weights: .inf"),
        ("runs: 24", "rnus: 24"),
    ):
        text = text.replace(old, new)
    assert message(tmp_path, monkeypatch, text).splitlines() == [
        "m.yaml:4: engine.most: expected a number from 1 up, got -1; for example engine.most: 8",
        "m.yaml:8: engine.rates[0].sizes: expected numbers above 0, got 0; correct or remove it",
        "m.yaml:8: engine.rates[0].sizes: expected ascending sizes, got 64, 0; order sizes and "
        "rates alike, each size once",
        "m.yaml:12: store.memory: expected a size such as 4GiB, 512MiB or 2GB, got '1TX'; 'TX' is "
        "not a unit: use KiB, MiB, GiB or TiB",
        "m.yaml:15: link.weights: expected a finite number, got .inf; for example "
        "link.weights: 12500000000.0 (bytes/s)",
        "m.yaml:17: accuracy.runs: missing key; add it",
        "m.yaml:17: accuracy.rnus: unknown key (did you mean 'runs'?); accuracy has low, high, "
        "runs, source",
    ]


def test_missing_link_and_missing_memory_are_given_together(tmp_path, monkeypatch):
    text = GOOD.replace("  memory: 64GiB\n", "").replace("link:\n", "link: null\n")
    text = text.replace("  weights: 1.25e9\n  gradients: 1.25e9\n", "")
    lines = message(tmp_path, monkeypatch, text).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["m.yaml:3", "engine.memory"],
        ["m.yaml:13", "link"],
    ]


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "{}\n", "null\n"])
def test_empty_file_is_explained(tmp_path, monkeypatch, text):
    assert message(tmp_path, monkeypatch, text) == (
        "m.yaml: expected a machine, got an empty file; give one of cs2, cs3, h100, h200, "
        f"hosts-100g, hosts-10g, hosts-25g, or start from {LIBRARY}/hosts-10g.yaml"
    )


def test_list_instead_of_keys_is_explained(tmp_path, monkeypatch):
    assert message(tmp_path, monkeypatch, "- name: rack\n") == (
        "m.yaml:1: expected keys and values such as `name: rack`, got [{'name': 'rack'}]"
    )


def test_file_of_20_mb_is_refused_without_reading_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open("m.yaml", "wb") as file:
        file.truncate(20_000_000)
    with pytest.raises(ConfigError) as raised:
        load_machine("m.yaml")
    assert str(raised.value) == (
        "m.yaml: cannot be read: it has 20,000,000 bytes, at most 1,048,576 are allowed; give "
        "another file"
    )


def test_folder_instead_of_a_file_is_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"^m\.yaml: cannot be read: expected a YAML file, got"):
        load_machine("m.yaml")


def test_configuration_of_a_run_is_refused_in_one_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt2\nbatch: {size: 4}\nengine: {memory: 4GiB}\nrun: {steps: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load_any(str(path))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(
        f"{path}: expected the description of a machine, got the configuration of a run; "
        "give one of cs2, "
    )
