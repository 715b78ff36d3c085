"""Training with nearly everything on flash: Penstock beside plain PyTorch and ZeRO-Infinity.

A GPT of 219 M parameters (16 layers, 1024 wide, vocabulary 8192), 4 sequences of 256 tokens, bf16,
AdamW with clipping. The loops, each in a process of its own, take turns step by step: plain PyTorch
with everything resident (autocast, fused AdamW); Penstock with weights, gradients and optimizer
state on flash and little memory, with moments of 32 and of 8 bits; DeepSpeed's ZeRO-3 with
parameters and optimizer state on NVMe, where DeepSpeed is installed.

    python benchmarks/versus_zero_infinity.py [--quick] [--rounds N] [--layers N] [--resume]
        [--folder FOLDER] [--dram SIZE] [--moments fp32|8bit] [--deepspeed-python PYTHON]

`value` is the least ratio of Penstock's tokens/s to plain PyTorch's; `to_zero_infinity` are those
to DeepSpeed's. With `--resume`, a small model is saved by each system after some steps, a new
process goes on, and its losses are compared with those of a run that nobody interrupted. The first
loss after resuming depends on weights alone; from the second on it shows whether moments came back.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from contract import (
    describe_machine,
    fastest_precision,
    limits_of_this_machine,
    print_limits,
    print_result,
)
from side_by_side import (
    Worker,
    WorkerEnded,
    greatest_difference,
    median_ratio,
    print_table,
    serve,
    summarize,
    take_turns,
)
from side_by_side.gpt import Gpt, make_trainer, resident_loop, warm_up, write_initial_weights
from side_by_side.zero_infinity import (
    HOW_TO_INSTALL,
    ZeroInfinity,
    environment,
    installed_version,
)

RESIDENT, ZERO = "resident", "zero-infinity"
PENSTOCK = {"fp32": "flash", "8bit": "flash 8bit"}  # loops by moments
TARGET, TARGET_RSS_GIB = 0.90, 1.5
BATCHES, WEIGHTS = "batches.npy", "weights.safetensors"
RESUME_GPT, STEPS_BEFORE, STEPS_AFTER = Gpt(layers=2, sequences=1, length=64), 3, 3


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker does: it may go on from what another saved, and save after some steps.

    `precision` is that of PyTorch and DeepSpeed, `fp32` or `bf16`; Penstock computes in bf16.
    """

    loop: str
    layers: int
    sequences: int
    length: int
    folder: str
    dram: str
    precision: str
    resume: bool = False
    save_after: int | None = None

    @property
    def gpt(self) -> Gpt:
        """The model and its batches."""
        return Gpt(self.layers, self.sequences, self.length)


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="2 of 16 layers, sequences of 64 tokens, two rounds"
    )
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--folder", default=None, help="where the stores on flash are made")
    parser.add_argument("--dram", default="330MB", help="memory of Penstock's store")
    parser.add_argument("--moments", choices=[*PENSTOCK], action="append", help="default: both")
    parser.add_argument("--deepspeed-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--resume", action="store_true", help="also compare resumed runs")
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Job(**json.loads(options.worker)))
        return
    rounds = options.rounds or (2 if options.quick else 7)
    layers = options.layers or (2 if options.quick else 16)
    python = options.deepspeed_python
    version = installed_version(python)
    if version is None:
        print(HOW_TO_INSTALL.format(python=python) + "\n", flush=True)
    loops = [RESIDENT, *(PENSTOCK[moments] for moments in options.moments or PENSTOCK)]
    folder = tempfile.mkdtemp(dir=options.folder)
    machine = describe_machine(folder)
    try:
        place = {"folder": folder, "dram": options.dram, "precision": fastest_precision()}
        job = Job(RESIDENT, layers, 4, 64 if options.quick else 256, **place)
        result = compare(job, loops, python if version else None, rounds)
        if options.resume:
            job = Job(RESIDENT, **vars(RESUME_GPT), **place)
            result["resume"] = compare_resumed(job, loops, python if version else None)
        limits = limits_of_this_machine(products=[job.precision], folder=folder)
    finally:
        shutil.rmtree(folder)
    settings = {
        "plain_precision": job.precision,
        "layers": layers,
        "rounds": rounds,
        "dram": options.dram,
        "deepspeed": version,
    }
    if version is None:
        settings["deepspeed_note"] = f"not installed in {python}; its loop was not run"
    print_limits(limits)
    print_result("versus_zero_infinity", **result, machine=machine | {"limits": limits}, **settings)


def start(job: Job, loop: str, python: str | None) -> Worker:
    """Start the worker of one loop; `python` is DeepSpeed's."""
    job = dataclasses.replace(job, loop=loop)
    if loop != ZERO:
        return Worker(job, __file__)
    assert python is not None
    return Worker(job, __file__, python=python, environment=environment(python))


def compare(job: Job, loops: list[str], python: str | None, rounds: int) -> dict:
    """Let the loops take turns; print a table; return ratios and peak memory."""
    failure = None
    workers = {loop: start(job, loop, python) for loop in loops}
    if python is not None:
        write_inputs(job, warm_up(rounds) + rounds)
        print("DeepSpeed builds its operators at first use, which takes minutes", flush=True)
        zero = {ZERO: start(job, ZERO, python)}
        try:
            take_turns(zero, 0)
            workers |= zero
        except WorkerEnded as error:
            failure = f"{error}; its message is above"
            print(f"DeepSpeed's loop is left out: {failure}", flush=True)
    seconds = take_turns(workers, rounds, warm_up=warm_up(rounds))
    found = summarize(workers, seconds, job.gpt.tokens)
    ratios = {
        other: {
            loop: round(median_ratio(seconds[other], seconds[loop]), 3)
            for loop in workers
            if loop in PENSTOCK.values()
        }
        for other in (RESIDENT, ZERO)
        if other in workers
    }
    print_table(
        {
            "loop": 14,
            "tokens/s": 9,
            "peak RSS": 10,
            "of resident": 12,
            "of ZeRO": 8,
            "last loss": 10,
        },
        (
            (
                name,
                f"{found['tokens_per_second'][name]:.1f}",
                f"{found['peak_rss_gib'][name]:.2f} GiB",
                *(
                    f"{median_ratio(seconds[other], seconds[name]):.3f}" if other in workers else ""
                    for other in (RESIDENT, ZERO)
                ),
                f"{found['loss'][name]:.5f}",
            )
            for name in workers
        ),
    )
    return {
        "value": min(ratios[RESIDENT].values()),
        "target": TARGET,
        "unit": "tokens/s with the store on flash over resident PyTorch's",
        "to_resident": ratios[RESIDENT],
        "to_zero_infinity": ratios.get(ZERO),
        "target_peak_rss_gib": TARGET_RSS_GIB,
        **found,
        **({} if failure is None else {"deepspeed_failure": failure}),
    }


def compare_resumed(job: Job, loops: list[str], python: str | None) -> dict:
    """Save, resume in a new process, and compare losses with an uninterrupted run's, by loop."""
    if python is not None:
        loops = [*loops, ZERO]
    result = {}
    for loop in loops:
        folders = [Path(job.folder) / "resume" / loop / name for name in ("whole", "parts")]
        for folder in folders:
            folder.mkdir(parents=True)
        whole, parts = (dataclasses.replace(job, folder=str(folder)) for folder in folders)
        if loop == ZERO:
            write_inputs(whole, STEPS_BEFORE + STEPS_AFTER)
            write_inputs(parts, STEPS_BEFORE + STEPS_AFTER)
        saving = dataclasses.replace(parts, save_after=STEPS_BEFORE)
        try:
            expected = losses(whole, loop, python, STEPS_BEFORE + STEPS_AFTER)
            before = losses(saving, loop, python, STEPS_BEFORE)
            found = losses(dataclasses.replace(parts, resume=True), loop, python, STEPS_AFTER)
        except WorkerEnded as error:
            if loop != ZERO:
                raise
            result[loop] = {"failure": str(error)}
            continue
        result[loop] = {
            "whole": expected[STEPS_BEFORE:],
            "resumed": found,
            "difference": greatest_difference(expected[STEPS_BEFORE:], found),
            # Two processes that do the same: what is not due to saving and resuming.
            "difference_before": greatest_difference(expected[:STEPS_BEFORE], before),
        }
    print(
        f"\nlosses of steps {STEPS_BEFORE + 1} to {STEPS_BEFORE + STEPS_AFTER}, saved after step "
        f"{STEPS_BEFORE}; `before`: the difference of the two processes' losses until then"
    )
    print_table(
        {"loop": 14, "uninterrupted": 26, "resumed": 26, "difference": 11, "before": 8},
        (
            (loop, "failed", "", "", "")
            if "failure" in row
            else (
                loop,
                *(" ".join(f"{x:.5f}" for x in row[name]) for name in ("whole", "resumed")),
                f"{row['difference']:.2g}",
                f"{row['difference_before']:.2g}",
            )
            for loop, row in result.items()
        ),
    )
    return result


def write_inputs(job: Job, steps: int) -> None:
    """Write what DeepSpeed's loop begins with: the same weights and batches as the others'."""
    job.gpt.write_batches(Path(job.folder) / BATCHES, steps)
    write_initial_weights(job.gpt, Path(job.folder) / WEIGHTS)


def losses(job: Job, loop: str, python: str | None, steps: int) -> list[float]:
    """Run a process for some steps and return its losses."""
    worker = start(job, loop, python)
    take_turns({loop: worker}, 0, warm_up=steps)
    worker.finish()
    return worker.losses


def work(job: Job) -> None:
    """Be a worker."""
    folder = Path(job.folder)
    if job.loop in PENSTOCK.values():
        step, save = penstock_loop(job)
    else:
        loop = (
            ZeroInfinity(job.gpt, folder, folder / BATCHES, folder / WEIGHTS, job.precision)
            if job.loop == ZERO
            else resident_loop(job.gpt)
        )
        if job.resume:
            loop.resume(folder)
        step, save = loop.step, lambda: loop.save(folder)
    steps = 0

    def step_and_save() -> float:
        nonlocal steps
        loss = step()
        steps += 1
        if steps == job.save_after:
            save()
        return loss

    serve(step_and_save)


def penstock_loop(job: Job) -> tuple[Callable[[], float], Callable[[], None]]:
    """Return a step of Penstock's trainer and how it saves; it resumes by itself."""
    moments = next(m for m, loop in PENSTOCK.items() if loop == job.loop)
    run_dir = Path(job.folder) / job.loop.replace(" ", "-")
    flash = {"path": str(run_dir / "flash"), "keep_steps": 1}
    trainer = make_trainer(job.gpt, run_dir, moments, {"dram": job.dram, "flash": flash})
    if job.resume and trainer.resumed_from is None:
        raise SystemExit(f"{run_dir} holds no step to go on from")
    return lambda: trainer.run_step().loss, trainer.save


if __name__ == "__main__":
    main()
