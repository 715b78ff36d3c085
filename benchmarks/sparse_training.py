"""Whole steps with sparse blocks against dense ones, on the same batches.

A GPT with layers 1024 wide and a vocabulary of 4096, AdamW with clipping, in fp32 and bf16. Three
loops, each in a process of its own, take turns step by step: Penstock dense, Penstock with blocks
that keep a tenth of their weights (`method: static`, masks at random), and plain PyTorch (the dense
model of `transformers`, eager, everything resident, fused AdamW, autocast for bf16).

`ratio` is steps per second, sparse over Penstock's own dense run; the value is the least of these
over its own target: 4 in fp32, 3 in bf16 where the processor has no matrix unit for bfloat16 (AMX),
1 where it has one. `over_plain` is steps per second, sparse over plain PyTorch: what a user gains
who would otherwise train the dense model without Penstock. Plain PyTorch computes in fp32 where the
processor has no products of bfloat16. Both dense loops begin with the same weights, and losses that
differ by more than rounding are an error. A sparse run's losses are those of another model.

Beside the ratios stand what each step of Penstock streams, what the store holds, how long the
updates take, the peak memory, and the share of a dense step's arithmetic that is not products with
the blocks' weights, which sparsity leaves as it is.

    python benchmarks/sparse_training.py [--quick] [--rounds N] [--precision fp32|bf16]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from contract import describe_machine, plain_precisions, print_result
from side_by_side import (
    Worker,
    check_losses,
    peak_rss_bytes,
    print_table,
    serve,
    speeds_over,
    take_turns,
)
from side_by_side.resident import Resident, gpt2_config, initial_gpt2

DENSE, SPARSE, PLAIN = "dense", "sparse", "plain"
VOCABULARY, WIDTH, SEED = 4096, 1024, 0
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
TARGETS = {"fp32": 4.0, "bf16": 3.0, "bf16 with AMX": 1.0}
SHARE = 0.25  # most of the dense run's store, stream and update time


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker trains.

    Attributes:
        loop: `DENSE`, `SPARSE` or `PLAIN`.
        sparsity: of the blocks of `SPARSE`.
    """

    loop: str
    sparsity: float
    precision: str
    layers: int
    sequences: int
    length: int


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one layer, 256 tokens: within 50 s")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--precision", choices=["fp32", "bf16"], action="append")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        job = Job(**json.loads(options.worker))
        if job.loop == PLAIN:
            serve(plain_loop(job).step)
        else:
            run = Run(job)
            serve(run.step, describe=run.describe)
        return
    layers, sequences, length = (1, 1, 256) if options.quick else (8, 4, 512)
    rounds = options.rounds or (2 if options.quick else 7)
    machine = describe_machine()
    results = [
        compare(Job("", options.sparsity, precision, layers, sequences, length), rounds, machine)
        for precision in options.precision or ["fp32", "bf16"]
    ]
    print_result(
        "sparse_training",
        value=round(min(result["ratio"] / result["target"] for result in results), 3),
        target=1.0,
        unit="least ratio of steps/s, sparse over dense, over its own target",
        machine=machine,
        sparsity=options.sparsity,
        layers=layers,
        rounds=rounds,
        by_precision=results,
    )


def compare(job: Job, rounds: int, machine: dict[str, Any]) -> dict[str, Any]:
    """Let the loops take turns; print a table; return the figures."""
    has_products = job.precision in plain_precisions()
    plain_precision = job.precision if has_products else "fp32"
    jobs = {name: dataclasses.replace(job, loop=name) for name in (DENSE, SPARSE, PLAIN)}
    jobs[PLAIN] = dataclasses.replace(jobs[PLAIN], precision=plain_precision)
    workers = {name: Worker(one, __file__) for name, one in jobs.items()}
    seconds = take_turns(workers, rounds)
    found = {name: worker.finish() for name, worker in workers.items()}
    losses = {name: workers[name].losses for name in (DENSE, PLAIN)}
    difference = check_losses(losses, job.precision)
    ratios = speeds_over(seconds, SPARSE)
    has_matrix_unit = "amx_bf16" in machine["processor"]
    target = TARGETS[job.precision + " with AMX" * (job.precision == "bf16" and has_matrix_unit)]
    rest = 1 - (1 - found[SPARSE]["flops"] / found[DENSE]["flops"]) / job.sparsity
    shares = {
        key: round(found[SPARSE][key] / found[DENSE][key], 3)
        for key in ("store_bytes", "streamed_bytes", "update_seconds")
    }
    print(
        f"\n{job.precision}, {job.layers} layers, {rounds} rounds, "
        f"{job.sequences} x {job.length} tokens, {job.sparsity:.0%} sparse blocks: "
        f"{ratios[DENSE]:.2f}x, target {target}x; {ratios[PLAIN]:.2f}x of plain PyTorch in "
        f"{plain_precision}; {rest:.0%} of a dense step's arithmetic stays as it is"
    )
    print_runs(workers, seconds, found, ratios)
    return {
        "precision": job.precision,
        "ratio": ratios[DENSE],
        "over_plain": ratios[PLAIN],
        "target": target,
        "plain_precision": plain_precision,
        "loss_difference": difference,
        "share_of_dense": shares,
        "target_share_of_dense": SHARE,
        "share_of_arithmetic_left": round(rest, 3),
        "seconds_per_step": {
            name: round(statistics.median(own), 4) for name, own in seconds.items()
        },
        "runs": found,
    }


def print_runs(
    workers: Mapping[str, Worker],
    seconds: Mapping[str, Sequence[float]],
    found: Mapping[str, Mapping[str, Any]],
    ratios: Mapping[str, float],
) -> None:
    """Print a row for each loop; plain PyTorch has no store, and no updates of their own."""
    print_table(
        {
            "run": 13,
            "s per step": 11,
            "sparse is": 10,
            "store": 10,
            "stream/step": 12,
            "update": 10,
            "peak RSS": 10,
            "last loss": 10,
        },
        (
            (
                name,
                f"{statistics.median(seconds[name]):.3f}",
                f"{ratios[name]:.2f}x",
                mebibytes(found[name].get("store_bytes")),
                mebibytes(found[name].get("streamed_bytes")),
                milliseconds(found[name].get("update_seconds")),
                f"{found[name]['peak_rss_bytes'] / 2**30:.2f} GiB",
                f"{workers[name].losses[-1]:.5f}",
            )
            for name in workers
        ),
    )


def mebibytes(size_bytes: int | None) -> str:
    """Return a size as text, a dash for none."""
    return "-" if size_bytes is None else f"{size_bytes / 2**20:,.0f} MiB"


def milliseconds(seconds: float | None) -> str:
    """Return a time as text, a dash for none."""
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


class Run:
    """One run of Penstock's trainer, and what its steps have reported."""

    def __init__(self, job: Job) -> None:
        from penstock.data import ArraySource
        from penstock.training import Trainer

        is_sparse = job.loop == SPARSE
        sparsity = {"method": "static", "sparsity": job.sparsity} if is_sparse else {}
        self._steps: list[Any] = []
        self._trainer = Trainer(
            {
                "model": {
                    "preset": "gpt2",
                    "n_embd": WIDTH,
                    "n_head": WIDTH // 64,
                    "n_layer": job.layers,
                    "vocab_size": VOCABULARY,
                },
                "precision": job.precision,
                "data": {"sequence_length": job.length},
                "batch": {"size": job.sequences, "micro": job.sequences},
                "optimizer": {
                    "learning_rate": LEARNING_RATE,
                    "betas": BETAS,
                    "weight_decay": WEIGHT_DECAY,
                    "clip_norm": CLIP,
                    "decay_1d": True,  # as AdamW of PyTorch does with all weights in one group
                    "schedule": {"name": "constant"},
                },
                "sparsity": sparsity,
                "engine": {"device": "cpu"},
                "run": {"dir": tempfile.mkdtemp(), "seed": SEED},
            },
            source=ArraySource(batches(job.length)),
            quiet=True,
        )

    def step(self) -> float:
        """Train one step and return its loss."""
        done = self._trainer.run_step()
        self._steps.append(done)
        return done.loss

    def describe(self) -> dict[str, Any]:
        """Return what a step streams and holds, and the median time of its updates."""
        last = self._steps[-1]
        return {
            "store_bytes": last.store_bytes,
            "streamed_bytes": last.streamed_bytes,
            "gradient_bytes": last.gradient_bytes,
            "update_seconds": statistics.median(s.update_seconds for s in self._steps[1:]),
            "flops": last.flops,
            "peak_rss_bytes": peak_rss_bytes(),
        }


def plain_loop(job: Job) -> Resident:
    """Return the dense model in plain PyTorch, with the weights that the dense run begins with."""
    from penstock.data import ArraySource

    config = gpt2_config(
        n_embd=WIDTH, n_head=WIDTH // 64, n_layer=job.layers, vocab_size=VOCABULARY
    )
    return Resident(
        initial_gpt2(config, SEED).train(),
        ArraySource(batches(job.length)),
        sequences=job.sequences,
        precision=job.precision,
        optimizer={"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY},
        clip=CLIP,
    )


def batches(length: int):  # type: ignore[no-untyped-def]
    """Return the training tokens as arrays: input_ids and labels, 64 rows."""
    import numpy as np

    tokens = np.random.default_rng(SEED).integers(0, VOCABULARY, (64, length + 1))
    return {"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}


if __name__ == "__main__":
    main()
