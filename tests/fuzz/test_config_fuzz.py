"""Any YAML is a configuration or a `ConfigError`; any figures are rows or left out."""

import contextlib
import json

from hypothesis import strategies as st
from mutations import mutated, mutated_json
from searching import EXAMPLES, search

from penstock.config import Config, commented, load, load_run
from penstock.errors import ConfigError
from penstock.telemetry.metrics_writer import drop_after, read_metrics

STARTER = commented(Config(model="gpt2"))
WORDS = ["model", "run", "dir", "store", "dram", "&a", "*a", "<<", "!!int", "!!map", "{", "}", "["]
WORDS += ["]", ":", "- ", ",", "\n", "  ", "0x", "1e9", "9" * 30, "GiB", "null", "true", "'", '"']
YAML = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=40).map(" ".join)


@EXAMPLES
def test_changed_configuration_is_valid_or_refused(tmp_path, examples):
    path = tmp_path / "config.yaml"

    def holds(data):
        path.write_bytes(data)
        for read in (lambda: load(path), lambda: load_run(tmp_path)):
            with contextlib.suppress(ConfigError):
                config = read()
                path.write_text(config.dump_yaml(), encoding="utf-8")
                assert load(path) == config or config.model is None

    table = mutated_json(Config(model="gpt2").to_mapping())
    spelled = table.map(lambda found: json.dumps(found).encode())
    text = YAML.map(lambda found: found.encode(errors="surrogatepass"))
    search(mutated(STARTER.encode()) | spelled | text | st.binary(max_size=200), holds, examples)


@EXAMPLES
def test_any_override_is_one_or_is_refused(examples):
    keys = st.sampled_from(["model", "run.dir", "run.steps", "store.dram", "optimizer", "x.y", ""])
    overrides = st.builds(lambda key, value: f"{key}={value}", keys, YAML | st.text(max_size=20))

    def holds(override):
        with contextlib.suppress(ConfigError):
            Config.from_mapping({"model": "gpt2"}, [override])

    search(overrides | st.text(max_size=30), holds, examples)


@EXAMPLES
def test_figures_that_were_changed_are_rows_or_left_out(tmp_path, examples):
    path = tmp_path / "metrics.jsonl"
    rows = [{"event": "step", "step": step, "loss": 1.5 / step} for step in range(1, 20)]
    valid = "".join(json.dumps(row) + "\n" for row in rows).encode()

    def of_cluster(row):
        return row.get("event") == "cluster"

    def holds(data):
        path.write_bytes(data)
        found = read_metrics(path)
        assert len(found) <= data.count(b"\n") + 1
        drop_after(path, 10)
        kept = [at for at, row in enumerate(found) if row["step"] <= 10 and not of_cluster(row)]
        cut = kept[-1] + 1 if kept else 0
        assert read_metrics(path) == [*found[:cut], *filter(of_cluster, found[cut:])]

    lines = mutated_json(rows).map(lambda found: "\n".join(map(json.dumps, found)).encode())
    search(mutated(valid) | lines | st.binary(max_size=300), holds, examples)
