"""What a limit on the memory of the whole process costs a run whose store is on flash.

The GPT of `side_by_side/gpt.py` (16 layers, 1024 wide, 219 M parameters), 4 x 512 tokens, bf16.
Three loops take turns step by step, each with 330 MB of memory for the store: two without a limit,
and one with `memory` a tenth above the least that Penstock accepts for this run. As runs with
little memory do, this one computes every stage a second time in the backward sweep, and so does one
of the others.
Losses must be the same numbers, and the peak of the limited process must be below its limit.

    python benchmarks/memory_limit.py [--quick] [--rounds N] [--above SHARE] [--folder FOLDER]

`value` is the median ratio of tokens/s with the limit to those of the loop that recomputes as much
without a limit. `peak_over_limit` is the peak of resident memory over the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from contract import describe_machine, limits_of_this_machine, print_limits, print_result
from contract.precisions import fastest_precision
from side_by_side import (
    Worker,
    median_ratio,
    peak_rss_bytes,
    print_table,
    serve,
    speeds_over,
    take_turns,
)
from side_by_side.gpt import Gpt, make_trainer, warm_up

LOOPS = ("unlimited", "recomputing", "limited")
LAYERS, SEQUENCES, LENGTH = 16, 4, 512
DRAM_BYTES = 330_000_000
TARGET = 0.9


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker does."""

    loop: str
    layers: int
    length: int
    above: float
    folder: str

    @property
    def gpt(self) -> Gpt:
        """The model and its batches."""
        return Gpt(self.layers, SEQUENCES, self.length)


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 of 16 layers, 128 tokens")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--above", type=float, default=0.1, help="the limit over the least, less 1")
    parser.add_argument("--folder", default=None, help="where the stores are")
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve_loop(Job(**json.loads(options.worker)))
        return
    layers, length, rounds = (2, 128, 2) if options.quick else (LAYERS, LENGTH, 7)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    machine = describe_machine(folder)
    try:
        jobs = [Job(loop, layers, length, options.above, str(folder)) for loop in LOOPS]
        result = compare(jobs, options.rounds or rounds)
        limits = limits_of_this_machine(products=[fastest_precision()], folder=folder)
    finally:
        shutil.rmtree(folder)
    print_limits(limits)
    if result["peak_over_limit"] > 1:
        raise SystemExit(f"the process used {result['peak_over_limit']:.3f} of its memory limit")
    print_result(
        "memory_limit",
        result["ratio"]["recomputing"],
        target=TARGET,
        unit="tokens/s with a memory limit over without, with as much recomputation",
        machine=machine | {"limits": limits},
        **result,
    )


def compare(jobs: list[Job], rounds: int) -> dict:
    """Take turns; print a table; return medians and peaks."""
    workers = {job.loop: Worker(job, __file__) for job in jobs}
    seconds = take_turns(workers, rounds, warm_up(rounds))
    losses = {name: worker.losses for name, worker in workers.items()}
    if len({tuple(own) for own in losses.values()}) > 1:
        raise SystemExit(f"the losses were expected to be the same numbers, got {losses}")
    ends = {name: worker.finish() for name, worker in workers.items()}
    rates = {
        name: median_ratio([jobs[0].gpt.tokens] * rounds, own) for name, own in seconds.items()
    }
    print(
        f"\n{jobs[0].layers} layers, {rounds} rounds, {SEQUENCES} x {jobs[0].length} tokens, bf16"
    )
    print_table(
        {"loop": 12, "tokens/s": 9, "peak RSS": 10, "limit": 10, "engine": 10, "store": 10},
        (
            (
                name,
                f"{rates[name]:.1f}",
                *(
                    "-" if end[key] is None else f"{end[key] / 2**30:.2f} GiB"
                    for key in ("peak_rss_bytes", "limit_bytes", "engine_bytes", "store_bytes")
                ),
            )
            for name, end in ends.items()
        ),
    )
    limited = ends["limited"]
    return {
        "ratio": speeds_over(seconds, "limited"),
        "peak_over_limit": round(limited["peak_rss_bytes"] / limited["limit_bytes"], 3),
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "processes": ends,
    }


def serve_loop(job: Job) -> None:
    """Be a worker."""
    step, describe = training_loop(job)
    serve(step, describe=describe)


def training_loop(job: Job) -> tuple[Callable[[], float], Callable[[], dict]]:
    """Return a step of Penstock's trainer, and a description of its memory for the end."""
    folder, limit = Path(job.folder), None
    flash = {"path": str(folder / f"{job.loop}-store"), "keep_steps": 1}
    store: dict = {"flash": flash, "dram": DRAM_BYTES}
    if job.loop == "limited":
        limit = int(least_memory(job, store) * (1 + job.above))
    memory = None if limit is None else f"{limit}B"
    run, recompute = folder / job.loop, "auto" if job.loop == "unlimited" else "always"
    trainer = make_trainer(job.gpt, run, "fp32", store, memory=memory, recompute=recompute)
    shares = trainer._layout.shares

    def describe() -> dict:
        return {
            "peak_rss_bytes": peak_rss_bytes(),
            "limit_bytes": limit,
            "engine_bytes": shares.engine_peak,
            "store_bytes": shares.store,
        }

    return lambda: trainer.run_step().loss, describe


def least_memory(job: Job, store: dict) -> int:
    """Return the least `memory` that is accepted, as the refusal of less says."""
    from penstock.config import ByteSize
    from penstock.errors import BudgetError

    try:
        make_trainer(
            job.gpt, Path(job.folder) / "refused", "fp32", store, memory="1MiB", recompute="always"
        )
    except BudgetError as error:
        if found := re.search(r"raise memory above ([\d.]+ \w+)", str(error)):
            return int(ByteSize.parse(found[1].replace(" ", "")))
        raise
    raise SystemExit("a memory limit of 1 MiB was expected to be refused")


if __name__ == "__main__":
    main()
