"""Does an engine's memory stay the same when the model gets deeper?

GPT-2 at three depths, everything recomputed, one micro-batch of 2 x 128 tokens, fp32. Per depth, a
process of its own (one for all with --quick) does a step of the engine and reads two numbers: the
peak of the engine's account, and how much its resident memory grew at most. Less the boundary
activations (one value per stage, which must be kept), what is left should not depend on the depth.

There is no store here: stages of one kind get the same weights, so that what a process holds
beside its engine is small and the same at every depth. They are there before the measurement: the
account counts the weights of the stage that computes, the growth of resident memory does not.

    python benchmarks/engine_memory.py [--quick]

`value` is the relative spread, (greatest - least) / least, of the account's peak without the
boundary activations; `measured_spread` is that of the resident memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

from contract import describe_machine, print_result

SEQUENCES, LENGTH = 2, 128
TARGET = 0.02
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a third as wide, a third as deep")
    parser.add_argument("--worker", nargs="+", type=int, metavar="WIDTH HEADS LAYERS...")
    options = parser.parse_args()
    if options.worker:
        width, heads, *depths = options.worker
        print(json.dumps([measure(layers, width, heads) for layers in depths]))
        return
    width, heads, depths = (256, 4, (4, 8, 16)) if options.quick else (768, 12, (12, 24, 48))
    # Processes of their own measure best, but each takes seconds to import what it needs.
    workers = [list(depths)] if options.quick else [[layers] for layers in depths]
    rows = []
    for chosen in workers:
        command = [sys.executable, __file__, "--worker", *map(str, [width, heads, *chosen])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    print(f"GPT-2, {width} wide, {SEQUENCES} x {LENGTH} tokens, fp32, every stage recomputed; MiB")
    print(
        f"{'layers':>6} {'weights':>9} {'boundary':>9} {'account':>9} {'less boundary':>14}"
        f" {'measured':>9} {'less boundary':>14} {'predicted':>10}"
    )
    for row in rows:
        measured = row["measured_bytes"]
        print(
            f"{row['layers']:6d} {mib(row['weight_bytes'])} {mib(row['boundary_bytes'])}"
            f" {mib(row['account_bytes'])} {mib(beyond(row, 'account_bytes')):>14}"
            f" {mib(measured)} {mib(beyond(row, 'measured_bytes')):>14}"
            f" {mib(row['predicted_bytes']):>10}"
        )
    print_result(
        "engine_memory",
        spread([beyond(row, "account_bytes") for row in rows]),
        target=TARGET,
        unit="relative spread over depths",
        machine=describe_machine(),
        measured_spread=spread([beyond(row, "measured_bytes") for row in rows]),
        quick=options.quick,
        width=width,
        rows=rows,
    )


def beyond(row: dict, key: str) -> int | None:
    """Return a peak without the boundary activations."""
    return None if row[key] is None else row[key] - row["boundary_bytes"]


def spread(sizes: list[int | None]) -> float | None:
    """Return (greatest - least) / least, None where nothing could be measured."""
    known = [size for size in sizes if size is not None]
    return round((max(known) - min(known)) / min(known), 4) if len(known) == len(sizes) else None


def mib(size: int | None) -> str:
    """Show bytes in MiB."""
    return f"{'-':>9}" if size is None else f"{size / 2**20:9.1f}"


def measure(layers: int, width: int, heads: int) -> dict:
    """Do two steps of an engine by hand, the second one watched."""
    import torch

    from penstock.engine import TorchEngine, keep_freed_pages, plan_engine, predict_bytes
    from penstock.models import ModelSource
    from penstock.planning import builders

    fields = {"n_layer": layers, "n_embd": width, "n_head": heads}
    source = ModelSource.from_preset("gpt2", fields)
    program = builders.compile_source(
        source, micro_batch=SEQUENCES, length=LENGTH, precision="fp32"
    )
    plan = plan_engine(program, 1, None, "always")
    torch.manual_seed(0)
    weights = {
        stage.kind.digest: [0.02 * torch.randn(w.shape) for w in stage.kind.weights]
        for stage in {s.kind.digest: s for s in program.stages}.values()
    }
    vocabulary = source.vocab_size or 2
    tokens = torch.randint(vocabulary, (SEQUENCES, LENGTH))
    rows = {"input_ids": tokens, "labels": tokens.roll(-1, 1)}
    keep_freed_pages()
    step(TorchEngine(program, plan), plan, weights, rows)  # compiles kernels, starts threads
    gc.collect()
    trim()
    before = watch()
    engine = TorchEngine(program, plan)
    step(engine, plan, weights, rows)
    after = resident("VmHWM")
    made = {n for s in program.stages for n in s.inputs if program.values[n].source == "stage"}
    return {
        "layers": layers,
        "weight_bytes": sum(program.stage_stream_bytes(s) for s in program.stages),
        "boundary_bytes": sum(program.values[n].bytes for n in made),
        "account_bytes": engine.memory.peak_bytes,
        "measured_bytes": None if before is None or after is None else after - before,
        "predicted_bytes": predict_bytes(program, 1, plan).peak_bytes,
    }


def step(engine, plan, weights: dict, rows: dict) -> None:  # type: ignore[no-untyped-def]
    """Sweep forward, turn, sweep backward; gradients are let go as they come."""
    from penstock.engine import Batch, compute
    from penstock.step_schedule import StepSchedule

    program, pending = engine.program, None
    engine.begin(Batch([rows], 0, 1, 0, 0))
    for operation in StepSchedule.of(program, plan.recompute).operations:
        given = weights[program.stages[operation.stage].kind.digest]
        engine.load(operation.stage, [given[i] for i in operation.positions])
        coming = compute(engine, operation)
        if pending is not None:
            pending.wait()
        pending = coming
    pending.wait()


def trim() -> None:
    """Give freed pages back to the system, so that the next step must take its own."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)


def watch() -> int | None:
    """Begin a new peak of resident memory; return what is resident now, where Linux tells."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return None
    return resident("VmRSS")


def resident(line: str) -> int | None:
    """Return a line of this process's status in bytes."""
    if not STATUS.exists():
        return None
    found = [row.split()[1] for row in STATUS.read_text().splitlines() if row.startswith(line)]
    return int(found[0]) * 1024 if found else None


if __name__ == "__main__":
    main()
