"""The picture of what was measured: efficiency, traffic and latency over the number of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

TICKS = [1, 2, 4, 8, 16, 32, 64, 128, 192]


def draw(curves: Sequence[Mapping], path: Path) -> str | None:
    """Draw curves into a file; without matplotlib, say how to get it and return None."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no picture: python -m pip install '.[plot]' to have one")
        return None
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    for number, found in enumerate(curves):
        engines, colour = found["engines"], f"C{number}"
        name = f"{found['machine'].partition(',')[0]}, {found['model']}"
        left.plot(engines, found["efficiency"], "o-", color=colour, label=_load(found))
        left.axhline(found["target"], color=colour, linestyle=":")
        sent = found["store_sent_bytes"] / 1e9
        middle.plot(engines, [sent] * len(engines), "o-", color=colour, label=name)
        idle = [1e3 * seconds for seconds in found["idle_step_seconds"]]
        right.plot(engines, idle, "o-", color=colour, label=name)
    left.set(title="Time of a step on one engine / on N", ylabel="efficiency (dotted: target)")
    least = min(0.9, *(share for found in curves for share in found["efficiency"]))
    left.set(ylim=(least - 0.02, 1.005))
    middle.set(title="What the store sends in a step", ylabel="GB")
    middle.set(ylim=(0, 1.5 * middle.get_ylim()[1]))  # for the legend
    right.set(title="A step with nothing to compute or carry", ylabel="ms", ylim=(0, None))
    for axis in (left, middle, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(TICKS, [str(tick) if tick != 128 else "" for tick in TICKS])
        axis.set_xlabel("engines")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle("Simulated: the batch grows with the number of engines")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(f"drawn: {path}")
    return str(path)


def _load(found: Mapping) -> str:
    tokens = f"{found['tokens_per_engine'] / 1000:.0f}k tokens per engine"
    return f"{found['machine']}: {found['model']} {found['precision']},\n{tokens}"
