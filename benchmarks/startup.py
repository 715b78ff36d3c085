"""How long does the command line make someone wait before anything happens?

Five commands, each in a fresh process: the help text, a mistyped key in a configuration (which is
to be answered before anything heavy is imported), the program of GPT-3 175B, whose weights
are never made: with an empty cache of compiled programs, and with the program in the cache; and the
demo, started a second time and stopped after its first step. Seconds until the end (of the demo:
until its first step is shown) and peak resident memory of the process; the median counts. The line
after the table has the parts of a program in a process that has imported everything, and the
compilation that traces every block instead of comparing equal ones (`compiler/equal_blocks`).

    python benchmarks/startup.py [--quick]

`value` is the worst figure as a share of its target: at most 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from contract import describe_machine, print_result

ROOT = Path(__file__).resolve().parent.parent
QUICK_TEXT = Path(sysconfig.get_paths()["stdlib"]) / "email"  # instead of all of the library
FIRST_STEP = "step 1/"  # in the line of the demo's first step
PENSTOCK = [str(Path(sys.executable).with_name("penstock"))]
# Some environments forbid bytecode; each start would then compile 400 modules of Penstock.
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}


def main() -> None:
    """Run the commands in turns and compare them with their targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="GPT-3 6.7B, less text, repeated less")
    quick = parser.parse_args().quick
    machine = describe_machine()
    model = "gpt3-6.7b" if quick else "gpt3-175b"
    recipe = str(ROOT / "recipes" / "tiny.yaml")
    program, cold = ["program", model], f"penstock program {model}"
    cached, demo = "the same from the cache", "first step of a second demo"
    # name, arguments, what the output must hold, seconds, bytes
    commands = [
        ("penstock --help", ["--help"], "train", 0.7, None),
        ("a mistyped key", ["train", recipe, "batch.sise=4"], "did you mean", 2.0, None),
        (cold, program, "in all", 12.0, 2**30),
        (cached, program, "in all", 3.0, 2**30),
        (demo, [], FIRST_STEP, 5.0, None),
    ]
    times: dict[str, list[float]] = {name: [] for name, *_ in commands}
    peaks: dict[str, list[int]] = {name: [] for name, *_ in commands}
    few = 1 if quick else 3
    with tempfile.TemporaryDirectory(prefix="penstock-startup-") as cache:
        for number in range(3 if quick else 5):
            for name, arguments, wanted, _, limit in commands:
                if name == demo or (limit is not None and number >= few):
                    continue
                if name == cold:
                    for kind in ("programs", "outlines", "models"):
                        shutil.rmtree(Path(cache) / "penstock" / kind, ignore_errors=True)
                seconds, peak = run(arguments, wanted, cache)
                times[name].append(seconds)
                peaks[name].append(peak)
        # What text there is counts for the first start alone, which builds the data and compiles.
        text = [f"data.input=[{QUICK_TEXT}]"] if quick else []
        first_step(Path(cache), text)
        for _ in range(few):
            seconds, peak = first_step(Path(cache), text)
            times[demo].append(seconds)
            peaks[demo].append(peak)
        parts = program_seconds(model, cache)
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
    print(f"in one process: {', '.join(f'{name} {parts[name]:.2f} s' for name in parts)}")
    print_result(
        "startup",
        round(worst, 3),
        target=1.0,
        unit="worst share of a target",
        machine=machine,
        quick=quick,
        rows=rows,
        parts=parts,
    )


def program_seconds(model: str, cache: str) -> dict[str, float]:
    """Return the seconds of the parts of a program, in one process without its imports: the
    description of the model, the compilation, the same with every block traced, and the program
    from the cache."""
    os.environ["XDG_CACHE_HOME"] = cache
    from penstock.compiler.equal_blocks import tracing
    from penstock.config import PresetModel
    from penstock.planning import builders, model_sources

    def compile_it() -> None:
        builders.compile_source(
            source, micro_batch=1, length=length, precision="fp32", with_buffers=False
        )

    seconds: dict[str, float] = {}
    preset = PresetModel(preset="tiny")
    source, length = model_sources.model_source(preset), 8
    compile_it()  # imports what a compilation imports
    programs, fewest = Path(cache) / "penstock" / "programs", tracing.FEWEST_BLOCKS
    for name in ("model", "every block traced", "compiled", "cached"):
        started = time.perf_counter()
        if name == "model":
            source = model_sources.model_source(PresetModel(preset=model))
            length = source.max_sequence_length or 1
        else:
            if name != "cached":
                shutil.rmtree(programs, ignore_errors=True)
            tracing.FEWEST_BLOCKS = sys.maxsize if name == "every block traced" else fewest
            compile_it()
        seconds[name] = time.perf_counter() - started
    return seconds


def first_step(cache: Path, settings: list[str]) -> tuple[float, int]:
    """Start the demo in a new folder, with the data set of the last one; return the seconds until
    its first step is shown, and its peak resident bytes then."""
    folder = cache / "run"
    shutil.rmtree(folder, ignore_errors=True)
    own = [f"run.dir={folder}", f"data.path={cache / 'data'}", "logging.every=1"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.demo", *own, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **BYTECODE, "XDG_CACHE_HOME": str(cache)},
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if FIRST_STEP in line:
            seconds = time.perf_counter() - started
            process.kill()
            _, _, usage = os.wait4(process.pid, 0)
            process.stdout.close()
            return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    raise RuntimeError(f"the demo made no step:\n{''.join(output)}")


def run(arguments: list[str], wanted: str, cache: str) -> tuple[float, int]:
    """Run a command with a cache folder; return its seconds and its peak resident bytes."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [*PENSTOCK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **BYTECODE, "XDG_CACHE_HOME": cache},
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
