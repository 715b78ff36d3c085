"""The page on the folder of a run names every file and every key that runs write, and no other."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from penstock import Trainer
from penstock.telemetry import ClusterEvent, PredictedStep, StepCycles
from penstock.telemetry.metrics_writer import MetricsFile

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/run_folder.md").read_text(encoding="utf-8")
EVENTS = ("step", "evaluation", "checkpoint", "cluster", "report")
FLASH = {"store": {"dram": "16MiB"}}
SHARDED = {"store": {"dram": "32MiB", "shards": 2}}
SPARSE = {"sparsity": {"method": "set", "sparsity": 0.5, "update_every": 2, "update_end": 4}}
KINDS = {"dense": {}, "sparse": SPARSE, "flash": FLASH, "sharded": SHARDED}


def section(event):
    """The text of an event's section."""
    found = re.search(
        rf'^### `"event": "{event}"`\n(.*?)(?=^##|\Z)', PAGE, re.DOTALL | re.MULTILINE
    )
    assert found, event
    return found[1]


def rows_of(text):
    """The first cells of a text's tables, without their heads."""
    first = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in first for name in re.findall(r"`([^`]+)`", cell)}


def keys(event):
    """The keys that the page documents for an event."""
    text = section(event)
    found = {"event", "step"} | rows_of(text)
    if event == "report":
        before = text.partition("\n|")[0]
        found |= set(re.findall(r"`(\w+)`", before))
    return found


def settings(folder, **changes):
    if "store" in changes:
        changes["store"] = {**changes["store"], "flash": {"path": str(folder / "flash")}}
    return {
        "model": {"preset": "tiny", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16},
        "data": {
            "input": [str(ROOT / "LICENSE")],
            "validation": 0.2,
            "tokenizer": "train-bpe:300",
        },
        "batch": {"size": 4},
        "run": {"dir": str(folder / "run"), "steps": 4},
        "evaluation": {"every": 2, "batches": 1},
        "checkpoint": {"every": 2, "best": True},
        **changes,
    }


def generic(path):
    """The path as the page writes it: of numbered files the first one, or the one that it names."""
    if path.startswith(("model/", "tensorboard/", "workers/")):
        return path.partition("/")[0] + "/"
    path = re.sub(r"step-\d+", "step-00000500", path)
    path = re.sub(r"shard-\d+", "shard-0", path)
    return re.sub(r"(stage|train|validation)-\d+", r"\1-00000", path)


@pytest.mark.parametrize("kind", KINDS)
def test_page_names_every_file_and_every_key_that_a_run_writes(kind, tmp_path):
    Trainer(settings(tmp_path, **KINDS[kind])).train()
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["event"] for row in rows} == set(EVENTS) - {"cluster"}
    assert [(row["event"], set(row) ^ keys(row["event"])) for row in rows] == [
        (row["event"], set()) for row in rows
    ]
    files, _, rest = PAGE.partition("With `store.flash.path`")
    written = {generic(p.relative_to(run).as_posix()) for p in run.rglob("*") if p.is_file()}
    assert written - rows_of(files) == set()
    if "store" in KINDS[kind]:
        flash = tmp_path / "flash"
        paths = [path for path in flash.rglob("*") if path.is_file()]
        on_flash = {generic(path.relative_to(flash).as_posix()) for path in paths}
        documented = rows_of(rest.partition("## metrics")[0])
        of_shards = {name for name in documented if name.startswith("shard")}
        alone = {"journal", "extents"}
        assert on_flash == (documented - of_shards if kind == "flash" else documented - alone)
    else:
        other = {"model/", "tensorboard/", "cluster.json", "workers/"}
        assert rows_of(files) - written == other


def test_page_names_the_keys_of_cluster_events(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path)(ClusterEvent("joined", "engine 1 is ready", 1))
    assert set(json.loads(path.read_text())) == keys("cluster")


@pytest.mark.parametrize(
    ("event", "kind", "name"),
    [("report", PredictedStep, "predicted"), ("step", StepCycles, "cycles")],
)
def test_page_names_the_keys_of_nested_objects(event, kind, name):
    text = re.search(
        rf"^`{name}` is an object.*?(?=\n\n|\Z)", section(event), re.DOTALL | re.MULTILINE
    )
    assert text
    named = set(re.findall(r"`(\w+)`", text[0])) - {name, "forward", "backward", "turn"}
    assert named == {field.name for field in fields(kind)}
