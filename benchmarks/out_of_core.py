"""What it costs that weights and optimizer state are on flash instead of in memory.

A GPT of 219 M parameters (16 layers, 1024 wide, vocabulary 8192), 4 sequences of 256 tokens, bf16,
AdamW with clipping. Four loops, each in a process of its own, take turns step by step: plain
PyTorch with everything resident (autocast, fused AdamW), Penstock with its store in memory, the
same while two threads move the bytes of a step on flash to and from a file and do nothing with
them, and Penstock with its store on flash and a quarter of the store's bytes in memory.

    python benchmarks/out_of_core.py [--quick] [--flash-bound] [--rounds N] [--folder FOLDER]
                                     [--dram SIZE|SHARE] [--moments fp32|8bit]
                                     [--sequences N] [--length TOKENS] [--disk-rate SIZE]
    python benchmarks/out_of_core.py --speculate [--quick] [--rounds N] [--sequences N] ...

`value` is the median ratio of tokens/s on flash to those in memory. A step moves the same bytes
whatever its batch, so `--sequences 8` shows what they cost where there is more to compute.
`to_resident` is the ratio to plain PyTorch (target 0.90, with a peak resident memory below
1.5 GiB), `to_beside_disk` the one to the store in memory with the disk moving: what the store adds
to the price that the machine asks for the bytes alone. Bytes per step are counted, and a plain loop
of direct reads and writes of as many bytes, with nothing beside it, runs after.

With `--flash-bound` a step is one sequence of 64 tokens, so that flash is the larger term, and a
plain loop moves as many bytes in turns with it: `value` is the median ratio of bytes/s to its. With
`--disk-rate 1GB` both loops are held to so many bytes per second, reads and writes together: a disk
slower than the one that is there, so that flash is the larger term in both sweeps.

With `--speculate` the store on flash runs without updates before the commit (off), with them (on),
and with them where they are expected to pay (auto), in turns with the store in memory while the
same bytes move beside it, and with the plain loop; at the disk as it is, and held to 2, 1 and 0.5
GB/s. The bound of a step is the larger of the last two: `value` is the least median share of it
that `auto` reaches at any rate. No step clips, so that no update is in vain.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from contract import (
    describe_machine,
    fastest_precision,
    limits_of_this_machine,
    print_limits,
    print_result,
)
from side_by_side import (
    Worker,
    median_ratio,
    print_table,
    serve,
    speeds_over,
    summarize,
    take_turns,
)
from side_by_side.gpt import CHECKED_STEPS, CLIP, Gpt, make_trainer, resident_loop, warm_up
from side_by_side.pace import Pace
from side_by_side.plain_disk import NoDirectIO, PlainDisk

if TYPE_CHECKING:
    import numpy as np

LOOPS = ("flash", "memory", "beside disk", "resident")
SPECULATING = ("off", "on", "auto")
DISK_RATES = (None, 2_000_000_000, 1_000_000_000, 500_000_000)
NEVER_CLIPS = 1e6
TARGET, TARGET_RESIDENT, TARGET_RSS_GIB, TARGET_OF_DISK = 0.95, 0.90, 1.5, 0.90
# Weights, their low halves and moments.
BYTES_UPDATED = {"fp32": 4 + 8, "8bit": 4 + 2}
# Split masters, gradients in bf16, two moments; scales of 8-bit moments are a hundredth of them.
STORE_BYTES_PER_PARAMETER = {"fp32": 4 + 2 + 8, "8bit": 4 + 2 + 2}


@dataclasses.dataclass(frozen=True)
class Job:
    """What one worker does."""

    loop: str
    layers: int
    sequences: int
    length: int
    folder: str
    dram_bytes: int
    moments: str
    disk_rate: int | None
    compares_speculation: bool = False

    @property
    def gpt(self) -> Gpt:
        """The model and its batches."""
        return Gpt(self.layers, self.sequences, self.length)

    @property
    def store_bytes(self) -> int:
        """What weights, gradients and optimizer state take."""
        return self.gpt.parameters * STORE_BYTES_PER_PARAMETER[self.moments]

    @property
    def steps_file(self) -> Path:
        """Where a loop on flash writes what its steps moved; the plain loops read that of `off`."""
        own = f"steps-{self.loop}" if self.loop in ("on", "auto") else "steps"
        return Path(self.folder) / own

    def moved(self) -> list[dict]:
        """Return what the steps on flash moved, oldest first."""
        return [json.loads(line) for line in self.steps_file.read_text().splitlines()]


def main() -> None:
    """Run the benchmark, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="4 of 16 layers, sequences of 64 tokens, two rounds"
    )
    parser.add_argument("--flash-bound", action="store_true", help="few tokens; against the disk")
    parser.add_argument(
        "--speculate", action="store_true", help="updates before the commit, at four disk rates"
    )
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--folder", default=None, help="where the store on flash is made")
    parser.add_argument(
        "--dram",
        type=share_or_size,
        default=0.25,
        metavar="SIZE|SHARE",
        help="memory of the store on flash: 330MB, or 0.25 of the store's bytes (default)",
    )
    parser.add_argument(
        "--disk-rate", type=size, default=None, metavar="SIZE", help="bytes/s of a slower disk"
    )
    parser.add_argument("--moments", choices=["fp32", "8bit"], default="fp32")
    parser.add_argument("--sequences", type=int, default=None, help="of a step (4; flash-bound 1)")
    parser.add_argument("--length", type=int, default=None, help="tokens of each (256; 64)")
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        job = Job(**json.loads(options.worker))
        if job.loop == "resident":
            serve(resident_loop(job.gpt).step)
            return
        loops = {"plain": plain_loop, "beside disk": beside_disk_loop}
        serve(loops.get(job.loop, penstock_loop)(job))
        return
    if options.disk_rate is not None and not (options.flash_bound and options.disk_rate > 0):
        parser.error("--disk-rate goes with --flash-bound, and is above zero")
    layers, length, rounds = (4, 64, 2) if options.quick else (16, 256, 7)
    rounds = options.rounds or rounds
    sequences, length = (1, 64) if options.flash_bound else (4, length)
    gpt = Gpt(layers, options.sequences or sequences, options.length or length)
    dram = options.dram
    if isinstance(dram, float):
        dram = int(dram * gpt.parameters * STORE_BYTES_PER_PARAMETER[options.moments])
    folder = tempfile.mkdtemp(dir=options.folder)
    machine = describe_machine(folder)
    try:
        job = Job(
            "flash",
            **vars(gpt),
            folder=folder,
            dram_bytes=dram,
            moments=options.moments,
            disk_rate=options.disk_rate,
            compares_speculation=options.speculate,
        )
        if options.speculate:
            result = speculating(job, rounds, DISK_RATES[::3] if options.quick else DISK_RATES)
        elif options.flash_bound:
            result = against_disk(job, rounds)
        else:
            result = against_memory(job, rounds)
        limits = limits_of_this_machine(products=[fastest_precision()], folder=folder)
    finally:
        shutil.rmtree(folder)
    settings = {
        "layers": layers,
        "sequences": gpt.sequences,
        "length": gpt.length,
        "rounds": rounds,
        "dram_bytes": dram,
        "moments": options.moments,
        "flash_bound": options.flash_bound,
        "disk_rate": job.disk_rate,
    }
    print_limits(limits)
    print_result("out_of_core", **result, machine=machine | {"limits": limits}, **settings)


def size(text: str) -> int:
    """Return a size as a count of bytes."""
    from penstock.config import ByteSize

    try:
        return int(ByteSize.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def share_or_size(text: str) -> float | int:
    """Return a share of at most 1 as a float, a size as a count of bytes."""
    try:
        share = float(text)
    except ValueError:
        return size(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(
            f"expected a share above 0 and up to 1, or a size with its unit, got {text}"
        )
    return share


def start(job: Job, loops: tuple[str, ...]) -> dict[str, Worker]:
    """Start a worker for each loop."""
    return {loop: Worker(dataclasses.replace(job, loop=loop), __file__) for loop in loops}


def against_memory(job: Job, rounds: int) -> dict:
    """Compare flash, memory and plain PyTorch; then see what the disk gives."""
    workers = start(job, LOOPS)
    seconds = take_turns(workers, rounds, warm_up=warm_up(rounds))
    found = summarize(workers, seconds, job.gpt.tokens)
    found["ratio"] = speeds_over(seconds, "flash")
    print_table(
        {"loop": 12, "tokens/s": 9, "peak RSS": 10, "flash is": 9, "last loss": 10},
        (
            (
                name,
                f"{found['tokens_per_second'][name]:.1f}",
                f"{found['peak_rss_gib'][name]:.2f} GiB",
                f"{found['ratio'][name]:.3f}x",
                f"{found['loss'][name]:.5f}",
            )
            for name in LOOPS
        ),
    )
    disk = start(job, ("plain",))
    plain = take_turns(disk, 3, warm_up=0)["plain"]
    disk["plain"].finish()
    return {
        "value": found["ratio"]["memory"],
        "target": TARGET,
        "unit": "tokens/s on flash over in memory",
        "to_resident": found["ratio"]["resident"],
        "to_beside_disk": found["ratio"]["beside disk"],
        "target_to_resident": TARGET_RESIDENT,
        "target_peak_rss_gib": TARGET_RSS_GIB,
        **found,
        **traffic(job, rounds, plain),
    }


def against_disk(job: Job, rounds: int) -> dict:
    """Compare the bytes/s of steps on flash with those of a plain loop in turns with them."""
    workers = start(job, ("flash", "plain"))
    seconds = take_turns(workers, rounds, warm_up=warm_up(rounds))
    finals = {name: worker.finish() for name, worker in workers.items()}
    peak = round(finals["flash"]["peak_rss_bytes"] / 2**30, 2)
    moved = [step["read"] + step["written"] for step in job.moved()[-rounds:]]
    rates = [amount / s / 1e9 for amount, s in zip(moved, seconds["flash"], strict=True)]
    plain = [amount / s / 1e9 for amount, s in zip(moved, seconds["plain"], strict=True)]
    print_table(
        {"loop": 10, "GB/s": 8, "slowest": 8, "fastest": 8, "seconds": 8},
        (
            (
                name,
                f"{statistics.median(rate):.2f}",
                f"{min(rate):.2f}",
                f"{max(rate):.2f}",
                f"{statistics.median(seconds[name]):.2f}",
            )
            for name, rate in (("flash", rates), ("plain", plain))
        ),
    )
    return {
        "value": round(median_ratio(rates, plain), 3),
        "target": TARGET_OF_DISK,
        "unit": "bytes/s of a step over those of a plain loop of direct I/O",
        "gigabytes_per_second": round(statistics.median(rates), 3),
        "plain_gigabytes_per_second": round(statistics.median(plain), 3),
        "peak_rss_gib": peak,
        **traffic(job, rounds, seconds["plain"]),
    }


def speculating(job: Job, rounds: int, rates: Sequence[int | None]) -> dict:
    """Compare steps on flash with and without updates before the commit, at rates of the disk."""
    found = {}
    for rate in rates:
        folder = Path(job.folder) / f"at-{rate}"
        folder.mkdir()
        held = dataclasses.replace(job, folder=str(folder), disk_rate=rate)
        name = "as it is" if rate is None else f"{rate / 1e9:g} GB/s"
        result = found[name] = at_rate(held, rounds)
        share, seconds = result["share_of_bound"]["auto"], result["seconds"]["auto"]
        print(f"disk {name}: {seconds:.2f} s per step, {share:.3f} of the bound", flush=True)
        shutil.rmtree(folder)
    columns = {"disk": 9, **{f"{loop}, s": 8 for loop in (*SPECULATING, "bound")}}
    columns |= {"auto/off": 9, "of bound": 9, "early": 6}
    print_table(
        columns,
        (
            (
                name,
                *(f"{each['seconds'][loop]:.2f}" for loop in (*SPECULATING, "bound")),
                f"{each['speed_over_off']['auto']:.3f}x",
                f"{each['share_of_bound']['auto']:.3f}",
                f"{each['share_updated_early']['auto']:.0%}",
            )
            for name, each in found.items()
        ),
    )
    return {
        "value": min(each["share_of_bound"]["auto"] for each in found.values()),
        "target": TARGET_OF_DISK,
        "unit": "seconds of the bound over seconds of a step on flash, at the worst rate",
        "by_disk_rate": found,
    }


def at_rate(job: Job, rounds: int) -> dict:
    """Compare the loops at one rate of the disk."""
    workers = start(job, (*SPECULATING, "beside disk", "plain"))
    seconds = take_turns(workers, rounds, warm_up=CHECKED_STEPS)
    losses = {loop: workers[loop].losses[-1] for loop in SPECULATING}
    if len(set(losses.values())) > 1:
        raise SystemExit(f"the losses differ: {losses}")
    for worker in workers.values():
        worker.finish()
    bound = [max(pair) for pair in zip(seconds["beside disk"], seconds["plain"], strict=True)]
    early = {}
    for loop in SPECULATING:
        steps = dataclasses.replace(job, loop=loop).moved()[-rounds:]
        updated = sum(step["early"] for step in steps)
        early[loop] = updated / (job.gpt.parameters * BYTES_UPDATED[job.moments] * rounds)
    return {
        "seconds": {n: statistics.median(each) for n, each in (*seconds.items(), ("bound", bound))},
        "speed_over_off": speeds_over({loop: seconds[loop] for loop in SPECULATING}, "off"),
        "share_of_bound": {
            loop: round(median_ratio(bound, seconds[loop]), 3) for loop in SPECULATING
        },
        "share_updated_early": {loop: round(share, 3) for loop, share in early.items()},
    }


def traffic(job: Job, rounds: int, plain_seconds: list[float]) -> dict:
    """Return the bytes of a step, what it waited for them, and how long a plain loop takes."""
    steps = job.moved()[-rounds:]
    read = int(statistics.mean(step["read"] for step in steps))
    written = int(statistics.mean(step["written"] for step in steps))
    waited = statistics.mean(step["waited"] / step["seconds"] for step in steps)
    plain = statistics.median(plain_seconds)
    print(
        f"per step {read / 1e9:.2f} GB read and {written / 1e9:.2f} GB written, {waited:.0%} of it "
        f"waiting; a plain loop moves as much in {plain:.2f} s"
    )
    return {
        "read_bytes": read,
        "written_bytes": written,
        "share_waiting": round(waited, 3),
        "plain_loop_seconds": round(plain, 2),
    }


def penstock_loop(job: Job) -> Callable[[], float]:
    """Return a step of Penstock's trainer, its store in memory or on flash."""
    folder, store = Path(job.folder), {}
    is_on_flash = job.loop in ("flash", *SPECULATING)
    if is_on_flash:
        hold_disk(Pace(job.disk_rate))
        flash = {"path": str(folder / f"{job.loop}-store"), "keep_steps": 1}
        if job.loop in SPECULATING:
            flash["speculate"] = job.loop
        store = {"dram": job.dram_bytes, "flash": flash}
    clip_norm = NEVER_CLIPS if job.compares_speculation else CLIP
    trainer = make_trainer(job.gpt, folder / job.loop, job.moments, store, clip_norm)

    def step() -> float:
        done = trainer.run_step()
        if is_on_flash:
            figures = {
                "read": done.flash_read_bytes,
                "written": done.flash_written_bytes,
                "waited": done.flash_wait_seconds,
                "seconds": done.seconds,
                "early": done.flash_speculated_bytes,
            }
            with job.steps_file.open("a") as file:
                file.write(json.dumps(figures) + "\n")
        return done.loss

    return step


def hold_disk(pace: Pace) -> None:
    """Hold the store's reads and writes of extents to a rate, in this process."""
    from penstock.store.flash import medium

    read_at, write_at = medium.read_at, medium.write_at

    def paced_read(descriptor: int, into: np.ndarray, offset: int) -> int:
        with pace.moving(into.nbytes):
            return read_at(descriptor, into, offset)

    def paced_write(descriptor: int, data: np.ndarray, offset: int) -> int:
        with pace.moving(data.nbytes):
            return write_at(descriptor, data, offset)

    medium.read_at, medium.write_at = paced_read, paced_write


def beside_disk_loop(job: Job) -> Callable[[], float]:
    """Return a step of the store in memory, beside which a step's bytes are moved for nothing.

    They are spread over nine tenths of the step before, as a store would that reads ahead.
    """
    compute = penstock_loop(job)
    disk = plain_disk(job, "beside", Pace(None))
    before = math.inf

    def step() -> float:
        nonlocal before
        latest, started = job.moved()[-1], time.perf_counter()
        amount = latest["read"] + latest["written"]
        spread = math.ceil(amount / (0.9 * before)) if before < math.inf else math.inf
        rate = min(spread, job.disk_rate or math.inf)
        disk.pace = Pace(int(rate) if rate < math.inf else None)
        with ThreadPoolExecutor(1) as beside:
            moving = beside.submit(disk.move, latest["read"], latest["written"])
            loss = compute()
            moving.result()
        before = time.perf_counter() - started
        return loss

    return step


def plain_disk(job: Job, name: str, pace: Pace) -> PlainDisk:
    """Return a loop of reads and writes of a file as large as the store."""
    try:
        return PlainDisk(Path(job.folder) / name, job.store_bytes, pace)
    except NoDirectIO as error:
        raise SystemExit(str(error)) from None


def plain_loop(job: Job) -> Callable[[], float]:
    """Return a step that moves as many bytes as the latest step on flash; it has no loss."""
    disk = plain_disk(job, "plain", Pace(job.disk_rate))

    def step() -> float:
        latest = job.moved()[-1]
        disk.move(latest["read"], latest["written"])
        return float("nan")

    return step


if __name__ == "__main__":
    main()
