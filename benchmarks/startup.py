"""How long does the command line make someone wait before anything happens?

Three commands, each in a fresh process: the help text, a mistyped key in a configuration (which is
to be answered before anything heavy is imported), and the program of GPT-3 175B, whose weights
are never made. Seconds and peak resident memory of the process; the median counts.

    python benchmarks/startup.py [--quick]

`value` is the worst figure as a share of its target: at most 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from contract import describe_machine, print_result

ROOT = Path(__file__).resolve().parent.parent
PENSTOCK = [str(Path(sys.executable).with_name("penstock"))]


def main() -> None:
    """Run the commands in turns and compare them with their targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="GPT-3 6.7B; fewer repetitions")
    quick = parser.parse_args().quick
    machine = describe_machine()
    model = "gpt3-6.7b" if quick else "gpt3-175b"
    recipe = str(ROOT / "recipes" / "tiny.yaml")
    # name, arguments, what the output must hold, seconds, bytes
    commands = [
        ("penstock --help", ["--help"], "train", 0.7, None),
        ("a mistyped key", ["train", recipe, "batch.sise=4"], "did you mean", 2.0, None),
        (f"penstock program {model}", ["program", model], "in all", 12.0, 2**30),
    ]
    times: dict[str, list[float]] = {name: [] for name, *_ in commands}
    peaks: dict[str, list[int]] = {name: [] for name, *_ in commands}
    for number in range(3 if quick else 5):
        for name, arguments, wanted, _, limit in commands:
            if limit is not None and number >= (1 if quick else 3):
                continue
            seconds, peak = run(arguments, wanted)
            times[name].append(seconds)
            peaks[name].append(peak)
    rows, worst = [], 0.0
    print(f"{'command':28} {'seconds':>8} {'least':>7} {'target':>7} {'peak MiB':>9} {'target':>7}")
    for name, _, _, target, limit in commands:
        median, peak = statistics.median(times[name]), max(peaks[name])
        worst = max(worst, median / target, peak / limit if limit else 0.0)
        shown = f"{limit / 2**20:.0f}" if limit else "-"
        print(
            f"{name:28} {median:8.2f} {min(times[name]):7.2f} {target:7.1f}"
            f" {peak / 2**20:9.0f} {shown:>7}"
        )
        rows.append({"command": name, "seconds": median, "all": times[name], "peak_bytes": peak})
    print_result(
        "startup",
        round(worst, 3),
        target=1.0,
        unit="worst share of a target",
        machine=machine,
        quick=quick,
        rows=rows,
    )


def run(arguments: list[str], wanted: str) -> tuple[float, int]:
    """Run a command; return its seconds and its peak resident bytes."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [*PENSTOCK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    if wanted not in output:
        raise RuntimeError(f"{' '.join(arguments)} did not answer with {wanted!r}:\n{output}")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
