"""Run all benchmarks, one after the other, and check the line with which each ends.

    python benchmarks/contract [--quick] [NAME...]

One that fails, ends without its line or, with `--quick`, takes more than five minutes is a failure;
the others are run all the same. `make bench` is this.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent
sys.path[0] = str(FOLDER)

from contract import check_result  # noqa: E402

QUICK_LIMIT = 300.0  # seconds, of 50 that it should take on idle cores


def scripts() -> list[Path]:
    """Return the benchmarks: every script in the folder."""
    return sorted(FOLDER.glob("*.py"))


def main() -> int:
    """Run them, print how each went, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the quick form of each")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    options = parser.parse_args()
    known = {path.stem: path for path in scripts()}
    unknown = [name for name in options.names if name not in known]
    if unknown or not known:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}")
    rows = []
    for name in options.names or known:
        print(f"\n== {known[name].relative_to(FOLDER.parent)}", flush=True)
        began = time.perf_counter()
        how = run(known[name], options.quick)
        rows.append((name, time.perf_counter() - began, how))
    print("\nbenchmark               seconds  how it went")
    for name, seconds, how in rows:
        print(f"{name:22} {seconds:8.1f}  {how}")
    return int(any(how.startswith("FAILED") for _, _, how in rows))


def run(script: Path, is_quick: bool) -> str:
    """Run a benchmark, print what it prints, and return how it went in one line."""
    command = [sys.executable, str(script), *(["--quick"] if is_quick else [])]
    last, began = "", time.perf_counter()
    # In a session of its own: past the limit its worker processes end too.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        timer = threading.Timer(QUICK_LIMIT, end_group, [process.pid]) if is_quick else None
        if timer is not None:
            timer.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line
        finally:
            if timer is not None:
                timer.cancel()
    if is_quick and time.perf_counter() - began >= QUICK_LIMIT:
        return f"FAILED: not done in {QUICK_LIMIT:g} s"
    if process.returncode != 0:
        return f"FAILED: exit code {process.returncode}"
    try:
        result = check_result(script.stem, last)
    except ValueError as error:
        return f"FAILED: {error}"
    if result["value"] is None:
        return f"skipped: {result['skipped']}"
    target = "" if result["target"] is None else f" (target {result['target']:g})"
    return f"{result['value']:g}{target} {result['unit']}"


def end_group(leader: int) -> None:
    """Kill a process and all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
