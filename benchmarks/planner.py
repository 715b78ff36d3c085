"""Does a run do what the planner predicts?

Measures this host as `penstock calibrate` does, then predicts and trains runs that differ in model,
batch, sequence, type, sparsity, store, shards, engines and adapters (24; two small ones with
--quick). Each run is predicted in one process and trained in another, as `penstock plan` and
`penstock train` are: what the first has in memory does not count for the second.

The speed of a shared host drifts, so the host is measured again before a run when the last
measurement is older than --minutes; the medians of the last five measurements count, as with
`penstock calibrate`. Dense products are timed right after a measurement, and before and after each
run. If their rate has drifted by more than 10 %, the host is measured anew and the run is predicted
and trained again, at most twice; the result has the drift that was left. A run
is also trained again, at most twice, if other machines of the host took more than 5 % of the
processors' time during its steps (`steal` in Linux's /proc/stat). A run with short steps is trained
three times and its medians count, since equal runs differ. The result has how often each was
trained, and the time and memory of each of the three. With --quick, each run is trained once.

    python benchmarks/planner.py [--quick] [--folder FOLDER] [--only TEXT] [--minutes MINUTES]

`value` is the share of runs whose step took at most 15 % more or less than predicted. Beside it are
the median error of the step, the errors of peak memory, and whether bytes on every tier were exact.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from contract import describe_machine, print_result, start_products
from side_by_side import Worker

TARGET, TOLERANCE = 0.9, 0.15
# Free pages go back to the system after the steps 1, 2 and 4 (`engine/host_memory.py`), and the
# next step touches its pages again. In a run of hundreds of steps that is rare.
STEPS, WARM = 8, 5
MOST_STOLEN, TRIES = 0.05, 3
MOST_DRIFT, PROBES = 0.1, 5
SHORT_SECONDS, RUNS_IF_SHORT = 3.0, 3
VOCABULARY = 8192
GPT2 = {"preset": "gpt2", "vocab_size": VOCABULARY}
SMALL = {**GPT2, "n_layer": 4, "n_embd": 512, "n_head": 8}
TINY = {**SMALL, "n_layer": 2}
WIDE = {**GPT2, "n_layer": 4, "n_embd": 1024, "n_head": 16}
LLAMA = {
    "preset": "tinyllama-1.1b",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
}
SPARSE = {"method": "static", "sparsity": 0.9}


def run(
    model: dict[str, Any], batch: int, length: int, precision: str = "fp32", **more: Any
) -> dict[str, Any]:
    """Return the configuration of a run."""
    return {
        "model": model,
        "batch": {"size": batch},
        "data": {"sequence_length": length},
        "precision": precision,
        **more,
    }


def flash(dram: str) -> dict[str, Any]:
    """Return the sections of a run whose store is on flash."""
    return {"store": {"flash": {"path": "FLASH"}, "dram": dram}}


CASES: dict[str, dict[str, Any]] = {
    "gpt2 4x512 fp32": run(GPT2, 4, 512),
    "gpt2 4x512 bf16": run(GPT2, 4, 512, "bf16"),
    "gpt2 8x512 bf16": run(GPT2, 8, 512, "bf16"),
    "small 8x128 fp32": run(SMALL, 8, 128),
    "small 32x128 fp32": run(SMALL, 32, 128),
    "small 8x128 bf16": run(SMALL, 8, 128, "bf16"),
    "small 2x1024 fp32": run(SMALL, 2, 1024),
    "small 2x1024 bf16": run(SMALL, 2, 1024, "bf16"),
    "wide 4x256 fp32": run(WIDE, 4, 256),
    "wide 4x256 bf16": run(WIDE, 4, 256, "bf16"),
    "llama 8x256 fp32": run(LLAMA, 8, 256),
    "llama 8x256 bf16": run(LLAMA, 8, 256, "bf16"),
    "wide 8x256 fp32, 90 % sparse": run(WIDE, 8, 256, sparsity=SPARSE),
    "wide 8x256 bf16, 90 % sparse": run(WIDE, 8, 256, "bf16", sparsity=SPARSE),
    "gpt2 4x512 fp32, flash 500MiB": run(GPT2, 4, 512, **flash("500MiB")),
    "gpt2 4x512 fp32, flash 900MiB": run(GPT2, 4, 512, **flash("900MiB")),
    "gpt2 4x512 bf16, flash 1500MiB": run(GPT2, 4, 512, "bf16", **flash("1500MiB")),
    "gpt2 1x512 fp32, flash 500MiB": run(GPT2, 1, 512, **flash("500MiB")),
    "wide 4x256 fp32, 2 shards": run(WIDE, 4, 256, store={"shards": 2}),
    "gpt2 4x512 fp32, 2 engines": run(GPT2, 4, 512, engines=2, cluster={"start": "local"}),
    "wide 8x256 bf16, 2 engines": run(WIDE, 8, 256, "bf16", engines=2, cluster={"start": "local"}),
    "gpt2 4x512 fp32, LoRA": run(
        GPT2, 4, 512, lora={"rank": 8, "targets": ["*.c_attn.weight", "*.c_proj.weight"]}
    ),
    "llama 8x256 bf16, LoRA": run(
        LLAMA, 8, 256, "bf16", lora={"rank": 8, "targets": ["*.q_proj.weight", "*.v_proj.weight"]}
    ),
    "gpt2 4x512 fp32, 8-bit moments": run(GPT2, 4, 512, optimizer={"moments": "8bit"}),
}
QUICK = {
    "tiny 4x128 fp32": run(TINY, 4, 128),
    "tiny 4x128 bf16": run(TINY, 4, 128, "bf16"),
}
QUICK_PROBES, QUICK_SECONDS = 1, 2.0  # and seconds of a measurement of the host


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two small runs")
    parser.add_argument("--folder", type=Path, default=None, help="where all files are made")
    parser.add_argument("--only", default="", help="the runs whose name contains this text")
    parser.add_argument(
        "--minutes", type=float, default=4, help="from a measurement of the host to a run, at most"
    )
    parser.add_argument("--worker", nargs=4, metavar=("WORK", "CASE", "MACHINE", "FOLDER"))
    options = parser.parse_args()
    if options.worker:
        work, name, machine, place = options.worker
        case = (CASES | QUICK)[name]
        if work == "predict":
            print(json.dumps(predicted(case, Path(machine), Path(place))))
        else:
            print(json.dumps(trained(case, Path(place))))
        return
    only = options.only.lower()
    names = [name for name in (QUICK if options.quick else CASES) if only in name.lower()]
    if not names:
        parser.error(f"--only: no run contains {options.only!r}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        machine = describe_machine(folder)
        result = measure(Path(folder), names, options.minutes, is_quick=options.quick)
    print_result("planner", **result, machine=machine)


def measure(folder: Path, names: list[str], minutes: float, *, is_quick: bool) -> dict[str, Any]:
    """Calibrate, then predict and train every run; print a table; return the figures."""
    from penstock.calibration import calibrate
    from penstock.machines import MachineDescription, dump, median_machine

    described, measured_at = folder / "host.yaml", -math.inf
    hosts: list[MachineDescription] = []
    rates: list[float] = []  # of dense products, after each measurement of the host
    products, probes = start_products("fp32"), QUICK_PROBES if is_quick else PROBES
    found: dict[str, dict[str, Any]] = {}
    print(
        f"{'run':34} {'predicted':>10} {'took':>8} {'error':>7} {'drift':>6} {'memory':>7}  bytes"
    )
    for number, name in enumerate(names):
        for attempt in range(1 if is_quick else TRIES):
            place = folder / f"run{number}-{attempt}"
            place.mkdir()
            if time.monotonic() - measured_at > 60 * minutes:
                hosts = [*hosts[-4:], calibrate(QUICK_SECONDS if is_quick else 30, folder)]
                rates = [*rates[-4:], _product_rate(products, probes)]
                described.write_text(dump(median_machine(hosts)))
                measured_at = time.monotonic()
            around = [_product_rate(products, probes)]
            row = _predicted_and_trained(name, described, place, is_quick=is_quick)
            around.append(_product_rate(products, probes))
            expected = statistics.median(rates)
            row["drift"] = max((rate / expected - 1 for rate in around), key=abs)
            found[name] = row
            if abs(row["drift"]) <= MOST_DRIFT:
                break
            hosts, rates, measured_at = [], [], -math.inf  # those of a host of another speed
        print(
            f"{name:34} {row['predicted_seconds']:8.2f} s {row['seconds']:6.2f} s "
            f"{row['error']:+7.1%} {row['drift']:+6.1%} {_shown(row['memory_error'])}  "
            f"{'exact' if row['is_exact'] else row['bytes']}",
            flush=True,
        )
    products.finish()
    errors = [abs(row["error"]) for row in found.values()]
    memory = [abs(e) for row in found.values() if (e := row["memory_error"]) is not None]
    return {
        "value": round(sum(error <= TOLERANCE for error in errors) / len(errors), 3),
        "target": TARGET,
        "unit": f"share of runs whose step is within {TOLERANCE:.0%} of its prediction",
        "median_error": round(statistics.median(errors), 4),
        "median_memory_error": round(statistics.median(memory), 4) if memory else None,
        "memory_within_5_percent": sum(error <= 0.05 for error in memory),
        "largest_memory_error": round(max(memory), 4) if memory else None,
        "exact_bytes": sum(row["is_exact"] for row in found.values()),
        "runs": found,
    }


def _predicted_and_trained(
    name: str, described: Path, place: Path, *, is_quick: bool
) -> dict[str, Any]:
    """Predict a run in one process, train it in others, with `is_quick` in one; return both."""
    most_tries, runs_if_short = (1, 1) if is_quick else (TRIES, RUNS_IF_SHORT)
    before = _in_a_process("predict", name, described, place)
    runs = [_trained_alone(name, described, place, most_tries)]
    if runs[0]["seconds"] < SHORT_SECONDS:
        runs += [
            _trained_alone(name, described, place, most_tries) for _ in range(runs_if_short - 1)
        ]
    return compared((CASES | QUICK)[name], before, _median(runs)) | {
        "tries": sum(run["tries"] for run in runs),
        "all_seconds": [run["seconds"] for run in runs],
        "all_memory_bytes": [run["memory_bytes"] for run in runs],
    }


def _product_rate(products: Worker, probes: int) -> float:
    """Return the rate of dense products, in steps per second: the median of some."""
    return 1 / statistics.median(products.step() for _ in range(probes))


def _trained_alone(name: str, described: Path, folder: Path, most_tries: int) -> dict[str, Any]:
    """Train a run in a process of its own, again if its processors were taken."""
    tries = 0
    while True:
        tries += 1
        with tempfile.TemporaryDirectory(dir=folder) as own:
            after = _in_a_process("train", name, described, Path(own))
        if after["stolen"] <= MOST_STOLEN or tries == most_tries:
            return after | {"tries": tries}


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of equal runs, and the bytes of one if all moved as many, else of each."""
    median = statistics.median
    return {
        "seconds": median(run["seconds"] for run in runs),
        "memory_bytes": median(run["memory_bytes"] for run in runs),
        "stolen": max(run["stolen"] for run in runs),
        "parts": {key: median(run["parts"][key] for run in runs) for key in runs[0]["parts"]},
        "bytes": {
            key: size
            if all(run["bytes"][key] == size for run in runs)
            else [run["bytes"][key] for run in runs]
            for key, size in runs[0]["bytes"].items()
        },
    }


def _in_a_process(work: str, name: str, described: Path, place: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", work, name, str(described), str(place)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def predict_and_train(case: dict[str, Any], described: Path, folder: Path) -> dict[str, Any]:
    """Predict a run and train it in this process; return both."""
    return compared(case, predicted(case, described, folder), trained(case, folder))


def settings_of(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the configuration of a run in a folder."""
    settings: dict[str, Any] = json.loads(
        json.dumps(case).replace('"FLASH"', json.dumps(str(folder / "flash")))
    )
    return settings | {
        "evaluation": {"every": None},
        "checkpoint": {"every": None},
        "run": {"dir": str(folder / "run"), "steps": STEPS},
    }


def predicted(case: dict[str, Any], described: Path, folder: Path) -> dict[str, Any]:
    """Return the prediction of a run."""
    from penstock.config import Config
    from penstock.machines import load_machine
    from penstock.prediction import Planner, predicted_step

    config = Config.from_mapping(settings_of(case, folder))
    prediction = Planner(remember=True).plan(config, load_machine(described), is_here=True)
    return {
        "seconds": prediction.step_seconds,
        "memory_bytes": prediction.peak_memory_bytes,
        "parts": vars(predicted_step(prediction)),
    }


def trained(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a run; return what was measured."""
    import numpy as np

    from penstock import Trainer
    from penstock.config import Config
    from penstock.data import ArraySource
    from penstock.telemetry import PredictedStep, StepDone

    settings = settings_of(case, folder)
    config = Config.from_mapping(settings)
    rows, length = config.batch.size * STEPS, config.data.sequence_length or 1
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (rows, length + 1))
    steps: list[StepDone] = []
    marks = [(time.perf_counter(), stolen_seconds())]

    def note(event: object) -> None:
        if isinstance(event, StepDone):
            steps.append(event)
            if len(steps) in (WARM, STEPS):
                marks.append((time.perf_counter(), stolen_seconds()))

    trainer = Trainer(
        settings,
        source=ArraySource({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}),
        on_event=note,
        quiet=True,
    )
    trainer.train()
    trainer.close()
    (begin, stolen_before), (end, stolen) = marks[-2:]
    warm = steps[WARM:]
    parts = [field.name for field in fields(PredictedStep) if hasattr(warm[0], field.name)]
    return {
        "seconds": statistics.median(step.seconds for step in warm),
        # Of the steps: the prediction leaves out checkpoints, such as that at the end.
        "memory_bytes": warm[-1].peak_rss_bytes,
        "stolen": (stolen - stolen_before) / (end - begin) / (os.cpu_count() or 1),
        "parts": {key: statistics.median(getattr(step, key) for step in warm) for key in parts},
        "bytes": {
            "streamed_bytes": warm[-1].streamed_bytes,
            "gradient_bytes": warm[-1].gradient_bytes,
            # A disk that stalls makes a step read some weights twice.
            "flash_read_bytes": _usual(step.flash_read_bytes for step in warm),
            "flash_written_bytes": _usual(step.flash_written_bytes for step in warm),
        },
    }


def stolen_seconds() -> float:
    """Return the time, of all processors, that the hypervisor gave to others; 0 if not known."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def compared(case: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return a prediction and what was measured, with the errors."""
    bytes_ = {key: (before["parts"][key], size) for key, size in after["bytes"].items()}
    return {
        "predicted_seconds": before["seconds"],
        "seconds": after["seconds"],
        "stolen": after["stolen"],
        "error": after["seconds"] / before["seconds"] - 1,
        "predicted_parts": before["parts"],
        "parts": after["parts"],
        "predicted_memory_bytes": before["memory_bytes"],
        "memory_bytes": after["memory_bytes"],
        # Of several processes, which share pages, no sum is measured.
        "memory_error": None
        if case.get("cluster")
        else after["memory_bytes"] / before["memory_bytes"] - 1,
        "bytes": bytes_,
        "is_exact": all(expected == found for expected, found in bytes_.values()),
    }


def _shown(error: float | None) -> str:
    return "      -" if error is None else f"{error:+7.1%}"


def _usual(values: Any) -> int:
    return statistics.mode(values)


if __name__ == "__main__":
    main()
