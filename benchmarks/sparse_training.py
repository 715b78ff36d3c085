"""Whole steps with sparse blocks against dense ones, on the same batches.

A GPT with layers 1024 wide and a vocabulary of 4096, AdamW with clipping, in fp32 and bf16. Two
runs of Penstock, each in a process of its own, take turns step by step: one dense, and one whose
blocks keep a tenth of their weights (`method: static`, masks at random). The value is the least
ratio of steps per second over its own target: 4 in fp32, 3 in bf16 where the processor has no
matrix unit for bfloat16 (AMX), 1 where it has one. Beside it stand what each step streams, what
the store holds, how long the updates take, the peak memory, and the share of a dense step's
arithmetic that is not products with the blocks' weights, which sparsity leaves as it is.

    python benchmarks/sparse_training.py [--quick] [--rounds N] [--precision fp32|bf16]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from typing import Any

from contract import describe_machine, print_result
from side_by_side import Worker, peak_rss_bytes, print_table, serve, speeds_over, take_turns

VOCABULARY, WIDTH, SEED = 4096, 1024, 0
TARGETS = {"fp32": 4.0, "bf16": 3.0, "bf16 with AMX": 1.0}
SHARE = 0.25  # most of the dense run's store, stream and update time


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker trains."""

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
        run = Run(Job(**json.loads(options.worker)))
        serve(run.step, describe=run.describe)
        return
    layers, sequences, length = (1, 1, 256) if options.quick else (8, 4, 512)
    rounds = options.rounds or (2 if options.quick else 7)
    machine = describe_machine()
    results = [
        compare(Job(options.sparsity, precision, layers, sequences, length), rounds, machine)
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
    """Let a dense and a sparse run take turns; print a table; return the figures."""
    jobs = {"dense": dataclasses.replace(job, sparsity=0.0), "sparse": job}
    workers = {name: Worker(one, __file__) for name, one in jobs.items()}
    seconds = take_turns(workers, rounds)
    found = {name: worker.finish() for name, worker in workers.items()}
    ratio = speeds_over(seconds, "sparse")["dense"]
    has_matrix_unit = "amx_bf16" in machine["processor"]
    target = TARGETS[job.precision + " with AMX" * (job.precision == "bf16" and has_matrix_unit)]
    rest = 1 - (1 - found["sparse"]["flops"] / found["dense"]["flops"]) / job.sparsity
    shares = {
        key: round(found["sparse"][key] / found["dense"][key], 3)
        for key in ("store_bytes", "streamed_bytes", "update_seconds")
    }
    print(
        f"\n{job.precision}, {job.layers} layers, {rounds} rounds, "
        f"{job.sequences} x {job.length} tokens, {job.sparsity:.0%} sparse blocks: "
        f"{ratio:.2f}x, target {target}x; {rest:.0%} of a dense step's arithmetic stays as it is"
    )
    print_table(
        {"run": 8, "s per step": 11, "store": 10, "stream/step": 12, "update": 10, "peak RSS": 10},
        (
            (
                name,
                f"{statistics.median(seconds[name]):.3f}",
                f"{found[name]['store_bytes'] / 2**20:,.0f} MiB",
                f"{found[name]['streamed_bytes'] / 2**20:,.0f} MiB",
                f"{1000 * found[name]['update_seconds']:.0f} ms",
                f"{found[name]['peak_rss_bytes'] / 2**30:.2f} GiB",
            )
            for name in workers
        ),
    )
    return {
        "precision": job.precision,
        "ratio": ratio,
        "target": target,
        "share_of_dense": shares,
        "target_share_of_dense": SHARE,
        "share_of_arithmetic_left": round(rest, 3),
        "runs": found,
    }


class Run:
    """One run of the trainer, and what its steps have reported."""

    def __init__(self, job: Job) -> None:
        from penstock.data import ArraySource
        from penstock.training import Trainer

        sparsity = {"method": "static", "sparsity": job.sparsity} if job.sparsity else {}
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
                "optimizer": {"learning_rate": 3e-4, "schedule": {"name": "constant"}},
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


def batches(length: int):  # type: ignore[no-untyped-def]
    """Return the training tokens as arrays: input_ids and labels, 64 rows."""
    import numpy as np

    tokens = np.random.default_rng(SEED).integers(0, VOCABULARY, (64, length + 1))
    return {"input_ids": tokens[:, :-1].copy(), "labels": tokens[:, 1:].copy()}


if __name__ == "__main__":
    main()
