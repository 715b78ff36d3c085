"""Everything that only a GPU can show: the checks first, then the figures.

Checks: the tests that run on every device (exactness against plain PyTorch, recomputation,
resuming, engines, bit for bit) and on all of them as a group over NCCL (`engine.devices`), and
bfloat16 losses against the resident loop's. Figures: tokens/s of streaming against the resident
PyTorch loop (fused AdamW, bf16 autocast), as it is and compiled with a padded vocabulary, in turns,
each loop in a process of its own, and of the trainers that keep their state in host memory as well,
FSDP2 with `CPUOffloadPolicy` and, where DeepSpeed is installed, ZeRO-3; the same without CUDA
graphs, and without weights that are streamed before their update; how much of the weights' copying
hides behind computation; the rate of the copies; the device memory of the engine against what was
predicted; how fast weights arrive at all GPUs as a group, which each fetch a part and gather the
rest, beside how fast they arrive at one. With one GPU it is a group of one.
Sparse weights, which a GPU expands for its dense products: each product beside the dense one, with
a check of its bits, and whole steps with 90 % sparse blocks beside dense steps.

    python benchmarks/gpu.py [--quick] [--only checks|resident|offload|graphs|early|group|sparse]

`value` is the least ratio of tokens/s to a resident loop. Without a GPU it says so and ends well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from contract import describe_machine, print_result
from side_by_side import (
    Worker,
    greatest_difference,
    median_ratio,
    print_table,
    serve,
    take_turns,
)
from side_by_side.device_trace import trace
from side_by_side.gpu_loops import COMPILED, FSDP, LOOPS, RESIDENT, ZERO, Setup, has_zero
from side_by_side.worker import peak_rss_bytes
from side_by_side.zero_infinity import environment

ROOT = Path(__file__).resolve().parent.parent
LENGTH, LEARNING_RATE, WEIGHT_DECAY, CLIP, SEED = 1024, 3e-4, 0.1, 1.0, 0
BETAS = (0.9, 0.999)
PENSTOCK = "penstock"
TARGET = 0.92  # what other offloading trainers reach of resident speed
UNIT = "tokens/s over resident PyTorch's"
# model, sequences per step, sequences per micro-batch, rounds
RUNS = [("gpt2", 64, 16, 5), ("gpt3-1.3b", 64, 8, 3)]
QUICK_RUNS = [("gpt2", 16, 8, 2)]
WARM_UP = 4  # steps; the second is recorded as graphs, the fourth is the first to defer updates
# Large micro-batches: these loops move all weights once per micro-batch.
OFFLOAD_RUN, QUICK_OFFLOAD_RUN = ("gpt3-1.3b", 64, 16, 3), ("gpt2", 16, 8, 2)
# A sequence per GPU: so little to compute that weights are waited for.
GROUP_RUN, QUICK_GROUP_RUN = ("gpt3-1.3b", 5), ("gpt2", 2)
SPARSITY = 0.9
SPARSE_RUN, QUICK_SPARSE_RUN = ("gpt3-1.3b", 64, 8, 3), ("gpt2", 16, 8, 2)
SPARSE_SHAPES = [(2048, 2048), (8192, 2048), (2048, 8192), (12288, 12288)]
SPARSE_TOKENS, QUICK_SPARSE_TOKENS = (1024, 8192), (1024,)
SETTINGS = ("graphs", "early")
PARTS = ("checks", "resident", "offload", *SETTINGS, "group", "sparse")
TESTS = ["integration/test_devices.py", "integration/test_device_group.py"]
TESTS += ["integration/test_sparse_devices.py", "unit/sparsity/test_expanded_products.py"]
TESTS += ["unit/collectives/test_process_group.py", "unit/compiler/test_device_losses.py"]


def main() -> None:
    """Run the checks and the figures, or be one of the loops."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="GPT-2 only, fewer tokens")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part, or several")
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Job(**json.loads(options.worker)))
        return
    import torch

    machine = describe_machine()
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing was measured")
        print_result(
            "gpu",
            None,
            target=TARGET,
            unit=UNIT,
            machine=machine,
            skipped="no CUDA device",
            quick=options.quick,
        )
        return
    checks, found = measure(options.only or PARTS, options.quick)
    for name, passed in checks.items():
        print(f"{name:40} {'passed' if passed else 'FAILED'}")
    ratios = [row["ratio"] for row in found.get("rows", []) if row["other"] in (RESIDENT, COMPILED)]
    print_result(
        "gpu",
        min(ratios, default=None),
        **({} if ratios else {"skipped": "--only without the resident loops"}),
        target=TARGET,
        unit=UNIT,
        machine=machine | {"device": torch.cuda.get_device_name()},
        quick=options.quick,
        checks=checks,
        **found,
    )
    if not all(checks.values()):
        sys.exit(1)


def measure(parts: Sequence[str], quick: bool) -> tuple[dict[str, bool], dict[str, Any]]:
    """Run some parts; return the checks that passed or failed, and the figures."""
    checks: dict[str, bool] = {}
    found: dict[str, Any] = {}
    rows = []
    if "checks" in parts and not quick:
        checks["devices"] = run_tests()
    if "resident" in parts:
        for run in QUICK_RUNS if quick else RUNS:
            rows += [compare(*run, other) for other in (RESIDENT, COMPILED)]
    if "offload" in parts:
        run = QUICK_OFFLOAD_RUN if quick else OFFLOAD_RUN
        rows += [compare(*run, other) for other in offloading()]
    if rows:
        found["rows"] = rows
    for row in rows:
        checks[f"bf16 loss of {row['model']} and {row['other']}"] = row["loss_difference"] < 0.05
    for setting in SETTINGS:
        if setting in parts:
            runs = QUICK_RUNS if quick else RUNS
            found[setting] = [compare_setting(setting, *run) for run in runs]
            checks[f"losses with {setting} are those without"] = all(
                row["same_losses"] for row in found[setting]
            )
    if "group" in parts:
        found["group"] = compare_group(*(QUICK_GROUP_RUN if quick else GROUP_RUN))
        checks["losses of the group are those of one"] = found["group"]["same_losses"]
    if "sparse" in parts:
        products = compare_products(QUICK_SPARSE_TOKENS if quick else SPARSE_TOKENS)
        checks["sparse products have the bits of dense ones"] = all(
            each["same"] for each in products
        )
        found["sparse_products"] = products
        sparse = found["sparse"] = compare_sparse(*(QUICK_SPARSE_RUN if quick else SPARSE_RUN))
        checks["sparse engine is within its prediction"] = sparse["is_predicted"]
    return checks, found


def offloading() -> tuple[str, ...]:
    """Return the other trainers that can keep their state in host memory."""
    if has_zero():
        return (FSDP, ZERO)
    print("ZeRO-3 is left out: DeepSpeed is not installed (pip install deepspeed)")
    return (FSDP,)


def run_tests() -> bool:
    """Run the tests of all devices in a process of their own; return whether they passed."""
    paths = [str(ROOT / "tests" / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", *paths]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def compare(model: str, size: int, micro: int, rounds: int, other: str = RESIDENT) -> dict:
    """Let Penstock and another loop take turns; print a table; return medians and what was traced.

    `ratio` is Penstock's tokens/s over those of the other loop.
    """
    jobs = {name: Job(name, model, size, micro) for name in (PENSTOCK, other)}
    workers = {
        name: Worker(job, __file__, environment=variables(name)) for name, job in jobs.items()
    }
    seconds = take_turns(workers, rounds, warm_up=WARM_UP)
    finals = {name: worker.finish() for name, worker in workers.items()}
    tokens = size * LENGTH
    ratio = median_ratio(seconds[other], seconds[PENSTOCK])
    print(f"\n{model}, bf16, {size} x {LENGTH} tokens per step in micro-batches of {micro}")
    medians = {name: statistics.median(seconds[name]) for name in workers}
    print_table(
        {"loop": 14, "tokens/s": 10, "step s": 8, "device GiB": 11, "host GiB": 9, "last loss": 10},
        (
            (
                name,
                f"{tokens / medians[name]:.0f}",
                f"{medians[name]:.3f}",
                f"{finals[name]['peak_bytes'] / 2**30:.2f}",
                f"{finals[name]['peak_rss_bytes'] / 2**30:.2f}",
                f"{worker.losses[-1]:.4f}",
            )
            for name, worker in workers.items()
        ),
    )
    ours = finals[PENSTOCK]
    print(
        f"streaming is {ratio:.3f} of {other}; weights came at {ours['copy_gb_per_second']:.1f} "
        f"GB/s, {ours['overlap']:.0%} of their copying beside computation; the device computed "
        f"{ours['compute_share']:.0%} of the step; engine memory: {ours['peak_bytes'] / 2**30:.2f} "
        f"GiB measured, {ours['account_bytes'] / 2**30:.2f} in the account, "
        f"{ours['predicted_bytes'] / 2**30:.2f} predicted"
    )
    return {
        "model": model,
        "other": other,
        "ratio": round(ratio, 4),
        "tokens_per_second": {name: tokens / medians[name] for name in workers},
        "loss_difference": greatest_difference(workers[PENSTOCK].losses, workers[other].losses),
        **finals,
    }


def variables(loop: str) -> dict[str, str]:
    """Return the environment variables of a loop."""
    return environment(sys.executable, "cuda") if loop == ZERO else {}


def compare_setting(setting: str, model: str, size: int, micro: int, rounds: int) -> dict:
    """Let runs with and without a setting of `Job` take turns; print their times and memory."""
    jobs = {
        "with": Job(PENSTOCK, model, size, micro),
        "without": Job(PENSTOCK, model, size, micro, **{setting: False}),
    }
    workers = {name: Worker(job, __file__) for name, job in jobs.items()}
    seconds = take_turns(workers, rounds, warm_up=WARM_UP)
    finals = {name: worker.finish() for name, worker in workers.items()}
    print(f"\n{model}, bf16, {size} x {LENGTH} tokens per step in micro-batches of {micro}")
    print_table(
        {setting: 8, "step s": 8, "computing": 10, "device GiB": 11, "reserved GiB": 13}
        | {"store GiB": 10},
        (
            (
                name,
                f"{statistics.median(seconds[name]):.3f}",
                f"{found['compute_share']:.0%}",
                f"{found['account_bytes'] / 2**30:.2f}",
                f"{found['reserved_bytes'] / 2**30:.2f}",
                f"{found['store_bytes'] / 2**30:.2f}",
            )
            for name, found in finals.items()
        ),
    )
    for name, found in finals.items():
        waits = ", ".join(f"{wait['for']} at {wait['at']}" for wait in found["waits_ms"])
        print(f"{name}: longest waits of the device, ms: {waits}")
    return {
        "model": model,
        "speedup": median_ratio(seconds["without"], seconds["with"]),
        "same_losses": workers["with"].losses == workers["without"].losses,
        **finals,
    }


def compare_group(model: str, rounds: int) -> dict:
    """Let all GPUs as a group and one alone take turns; print how fast weights arrive."""
    import torch

    count = torch.cuda.device_count()
    jobs = {
        "group": Job(PENSTOCK, model, count, 1, count),
        "one": Job(PENSTOCK, model, count, 1),
    }
    workers = {name: Worker(job, __file__) for name, job in jobs.items()}
    seconds = take_turns(workers, rounds)
    finals = {name: worker.finish() for name, worker in workers.items()}
    print(f"\n{model}, bf16, {count} x {LENGTH} tokens per step, weights are waited for")
    print_table(
        {"way": 10, "GPUs": 5, "step s": 8, "copied GB/s": 12, "arrived GB/s": 13},
        (
            (
                name,
                f"{max(1, jobs[name].devices)}",
                f"{statistics.median(seconds[name]):.3f}",
                f"{found['copy_gb_per_second']:.1f}",
                f"{found['arrive_gb_per_second']:.1f}",
            )
            for name, found in finals.items()
        ),
    )
    rates = [finals[name]["arrive_gb_per_second"] for name in ("group", "one")]
    return {
        "model": model,
        "gpus": count,
        "arrival_ratio": rates[0] / rates[1],
        "step_ratio": median_ratio(seconds["one"], seconds["group"]),
        "same_losses": workers["group"].losses == workers["one"].losses,
        **finals,
    }


def compare_products(tokens: tuple[int, ...]) -> list[dict]:
    """Time and print the products of sparse weights beside those of dense ones."""
    from side_by_side.expanded_products import print_products, time_products

    rows = [time_products(shape, count, SPARSITY) for shape in SPARSE_SHAPES for count in tokens]
    print_products(rows)
    return rows


def compare_sparse(model: str, size: int, micro: int, rounds: int) -> dict:
    """Let runs with dense and with sparse blocks take turns; print times, bytes and memory."""
    jobs = {
        "dense": Job(PENSTOCK, model, size, micro),
        "sparse": Job(PENSTOCK, model, size, micro, sparsity=SPARSITY),
    }
    workers = {name: Worker(job, __file__) for name, job in jobs.items()}
    seconds = take_turns(workers, rounds)
    finals = {name: worker.finish() for name, worker in workers.items()}
    print(f"\n{model}, bf16, {size} x {LENGTH} tokens per step, blocks dense and {SPARSITY} sparse")
    print_table(
        {"blocks": 8, "step s": 8, "streamed GiB": 13, "copied GB/s": 12, "store GiB": 10}
        | {"device GiB": 11, "predicted GiB": 14},
        (
            (
                name,
                f"{statistics.median(seconds[name]):.3f}",
                f"{found['streamed_bytes'] / 2**30:.2f}",
                f"{found['copy_gb_per_second']:.1f}",
                f"{found['store_bytes'] / 2**30:.2f}",
                f"{found['peak_bytes'] / 2**30:.2f}",
                f"{found['predicted_bytes'] / 2**30:.2f}",
            )
            for name, found in finals.items()
        ),
    )
    return {
        "model": model,
        "sparsity": SPARSITY,
        "step_ratio": median_ratio(seconds["dense"], seconds["sparse"]),
        "is_predicted": finals["sparse"]["account_bytes"] <= finals["sparse"]["predicted_bytes"],
        **finals,
    }


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker does: which loop, on what; `devices` GPUs as a group, 0: one alone; the
    `sparsity` of the blocks, 0: dense; with CUDA `graphs`, and with `early` weights, where they are
    possible."""

    loop: str
    model: str
    size: int
    micro: int
    devices: int = 0
    sparsity: float = 0.0
    graphs: bool = True
    early: bool = True


def work(job: Job) -> None:
    """Be a worker."""
    import torch

    if job.loop == PENSTOCK:
        step, finish = penstock_loop(job)
    else:
        step, finish = LOOPS[job.loop](setup(job)), dict

    def describe() -> dict:
        peak = torch.cuda.max_memory_allocated()  # before `finish` does another step
        return {"peak_bytes": peak, "peak_rss_bytes": peak_rss_bytes(), **finish()}

    serve(step, describe=describe, settle=torch.cuda.synchronize)


Loop = tuple[Callable[[], float], Callable[[], dict]]


def settings(job: Job) -> dict:
    """Return the run as a configuration."""
    group = [f"cuda:{number}" for number in range(job.devices)]
    return {
        "model": {"preset": job.model},
        "precision": "bf16",
        "data": {"sequence_length": LENGTH},
        "batch": {"size": job.size, "micro": job.micro},
        "optimizer": {
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "clip_norm": CLIP,
            "decay_1d": True,
            "betas": list(BETAS),
            "schedule": {"name": "constant"},
        },
        "sparsity": {"method": "static", "sparsity": job.sparsity} if job.sparsity else {},
        # Half of the device: the other loop's memory stays allocated while it is not its turn.
        "engine": {
            "device": "cuda",
            "devices": group or None,
            "memory": device_bytes() // 2,
            "cuda_graphs": job.graphs,
        },
        "store": {"early_weights": job.early},
        "run": {"dir": tempfile.mkdtemp(), "seed": SEED},
    }


def device_bytes() -> int:
    """Return the memory of the first GPU."""
    import torch

    return torch.cuda.mem_get_info()[1]


def batches(vocabulary: int):  # type: ignore[no-untyped-def]
    """Return a source of random tokens, the same for both loops."""
    import numpy as np

    from penstock.data import ArraySource

    tokens = np.random.default_rng(SEED).integers(0, vocabulary, (256, LENGTH + 1))
    return ArraySource({"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()})


def setup(job: Job) -> Setup:
    """Return the run as the other loops take it."""
    optimizer = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "betas": list(BETAS)}
    rows = batches(vocabulary_of(job.model))
    return Setup(job.model, rows, job.size, job.micro, optimizer, CLIP, SEED)


def vocabulary_of(model: str) -> int:
    """Return the size of a preset's vocabulary."""
    from penstock.models import ModelSource

    return ModelSource.from_preset(model, {}).vocab_size or 2


def penstock_loop(job: Job) -> Loop:
    """Return a step of Penstock's trainer on the GPU, and what to say at the end."""
    import torch

    from penstock.engine import Sharing, predict_bytes
    from penstock.training import Trainer

    trainer = Trainer(settings(job), source=batches(vocabulary_of(job.model)))
    layout = trainer._layout

    def finish() -> dict:
        found = trace(trainer.run_step)
        share = -(-layout.micro_batches // max(1, job.devices))
        dense = layout.plan.dense_gradients
        sharing = Sharing(job.devices, layout.micro_batches, dense) if job.devices else None
        predicted = predict_bytes(layout.program, share, layout.plan, "cuda", sharing)
        last = trainer.run_step()
        trainer.close()
        return {
            **found,
            "streamed_bytes": last.streamed_bytes,
            "store_bytes": last.store_bytes,
            "account_bytes": max(e.memory.peak_bytes for e in trainer.engines),
            "predicted_bytes": predicted.peak_bytes,
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }

    return lambda: trainer.run_step().loss, finish


if __name__ == "__main__":
    main()
