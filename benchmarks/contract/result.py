"""The line of JSON with which every benchmark ends: what it must hold, and its check."""

from __future__ import annotations

import json
import math
from typing import Any


def print_result(
    benchmark: str,
    value: float | None,
    *,
    target: float | None,
    unit: str,
    machine: dict[str, Any],
    **more: Any,
) -> None:
    """Print the line.

    Args:
        benchmark: the script's name without `.py`.
        value: the figure; None only with `skipped`, the reason why there is none.
        target: what the figure is compared with, if anything.
        unit: of both.
        machine: what `describe_machine` returned, with `limits` where there are some.
        more: whatever else a reader may want.
    """
    line = {"benchmark": benchmark, "value": value, "target": target, "unit": unit}
    print(json.dumps({**line, "machine": machine, **more}), flush=True)


def check_result(benchmark: str, line: str) -> dict[str, Any]:
    """Return what a benchmark's last line of output holds.

    **Raises:** `ValueError` where it is not what the contract asks for.
    """
    try:
        result = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a line of JSON at the end, got {line[:80]!r}") from error
    if not isinstance(result, dict):
        raise ValueError(f"expected a JSON object at the end, got {line[:80]!r}")
    missing = [
        key for key in ("benchmark", "value", "target", "unit", "machine") if key not in result
    ]
    if missing:
        raise ValueError(f"the line of JSON has no {', '.join(missing)}")
    if result["benchmark"] != benchmark:
        raise ValueError(f"the line of JSON is of {result['benchmark']!r}, not of {benchmark!r}")
    if not isinstance(result["machine"], dict) or not result["machine"].get("processor"):
        raise ValueError("the machine of the line of JSON has no processor")
    value = result["value"]
    if value is None and result.get("skipped"):
        return result
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a finite value, or none and why it was skipped; got {value!r}")
    return result
