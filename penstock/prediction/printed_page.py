"""A prediction as a page that a person reads, and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.calibration import ENOUGH_RUNS, is_kept
from penstock.prediction.advice import Advice, least_dram_that_unbinds_flash, tried_changes
from penstock.prediction.planned_length import most_tokens
from penstock.prediction.predicted_run import RESOURCE_OF, Prediction
from penstock.progress import (
    show_bytes,
    show_count,
    show_dollars,
    show_duration,
    show_energy,
    show_flops,
    show_rate,
)

_WIDTH = 48  # of the time line
_SHADES = " ░▒▓█"


def page(prediction: Prediction, advice: Sequence[Advice]) -> Group:
    """Return the page: does it fit, the time of a step, what binds it, and what would help."""
    parts: list[RenderableType] = [
        Text(_title(prediction), style="bold"),
        Text(_fits(prediction)),
        _memory(prediction),
        Text(_speed(prediction)),
        _time_line(prediction),
        Text(_binding(prediction)),
        _traffic(prediction),
        *_width_of_link(prediction),
        Text(_decisions(prediction)),
    ]
    price = _price(prediction)
    if price:
        parts.append(Text(price))
    parts.append(Text(_advice(prediction, advice)))
    return Group(*parts)


def _title(prediction: Prediction) -> str:
    program, machine, config = prediction.plan.program, prediction.machine, prediction.config
    engines = f"{config.engines} engines" if config.engines > 1 else "one engine"
    title = f" ({machine.title})" if machine.title else ""
    return (
        f"{program.name}, {show_count(program.parameters)} parameters, {config.precision}, on "
        f"{engines} of {machine.name}{title}"
    )


def _fits(prediction: Prediction) -> str:
    need, limit = sum(prediction.plan.memory.values()), prediction.plan.memory_limit
    config = prediction.config
    if config.memory is not None and limit == int(config.memory):
        name = "`memory`"
    else:
        name = "the host's " + ("free memory" if is_kept(prediction.machine) else "memory")
    where = "" if prediction.full_disk_note is None else " in memory"
    text = f"\nIt fits{where}: {show_bytes(need)} of {show_bytes(limit)} of {name}."
    if prediction.full_disk_note is not None:
        text += f"\nIt does not fit on the disk. {prediction.full_disk_note}."
    if prediction.length_note is None:
        return text
    return f"{text}\n{most_tokens(prediction.plan.sequence_length)}"


def _memory(prediction: Prediction) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("memory of the host")
    table.add_column("", justify="right", no_wrap=True)
    for name, size in prediction.plan.memory.items():
        table.add_row(name, show_bytes(size))
    shares = prediction.plan.shares
    if not prediction.machine.engine.is_host:
        memory = prediction.machine.engine.memory
        assert memory is not None
        table.add_section()
        table.add_row(
            f"each engine, of engine.memory (device: {show_bytes(int(memory))})",
            f"{show_bytes(shares.engine_peak)} of {show_bytes(shares.engine)}",
        )
    if prediction.shard_bytes is not None:
        table.add_section()
        holders = prediction.config.store.holders
        name = f"each of {holders} hosts" if holders > 1 else "the host"
        table.add_row(f"{name} of the store's shards", show_bytes(prediction.shard_bytes))
    if prediction.flash is not None:
        table.add_section()
        table.add_row("store on flash", show_bytes(prediction.flash.flash_bytes))
    return table


def _speed(prediction: Prediction) -> str:
    interval = prediction.step_interval
    between = ""
    if interval is not None:
        between = f" (nine of ten measured runs: {_range(interval)})"
    elif is_kept(prediction.machine):
        between = f" (no interval yet: fewer than {ENOUGH_RUNS} runs were measured on this host)"
    else:
        between = " (not compared with measured runs on this machine)"
    rate = prediction.flops / prediction.step_seconds
    total = prediction.run_interval
    also = f" (by the measured runs: {_range(total)})" if total is not None else ""
    note = prediction.accuracy_note
    return (
        f"One step takes {show_duration(prediction.step_seconds)}{between}: "
        f"{show_count(prediction.tokens_per_second)} tokens/s, {show_flops(rate)}FLOP/s.\n"
        f"{prediction.config.run.steps:,} steps take {show_duration(prediction.run_seconds)}{also}"
        f"{_dense_steps(prediction)}." + (f"\n{note}." if note is not None else "")
    )


def _range(seconds: tuple[float, float]) -> str:
    low, high = map(show_duration, seconds)
    return f"{low} to {high}"


def _dense_steps(prediction: Prediction) -> str:
    seconds = prediction.dense_step_seconds
    if seconds is None or not prediction.dense_steps:
        return ""
    return (
        f"; {prediction.dense_steps:,} of them compute the gradients of absent entries too, and "
        f"take {show_duration(seconds)}"
    )


def _time_line(prediction: Prediction) -> Table:
    """One row per resource: in each column of time, how busy it is."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("one step")
    table.add_column(f"0 to {show_duration(prediction.step_seconds)}", no_wrap=True)
    table.add_column("busy", justify="right")
    width = prediction.step_seconds / _WIDTH
    for resource, share in prediction.busy["step"].items():
        filled = [0.0] * _WIDTH
        for span in prediction.spans:
            if RESOURCE_OF.get(span.what) != resource:
                continue
            first, last = int(max(span.begin, 0.0) / width), int(span.end / width)
            for column in range(first, min(last + 1, _WIDTH)):
                begin, end = column * width, (column + 1) * width
                filled[column] += max(0.0, min(span.end, end) - max(span.begin, begin)) / width
        bar = "".join(_shade(value) for value in filled)
        table.add_row(resource, bar, f"{share:.0%}")
    return table


def _shade(value: float) -> str:
    """Return a block that is as dark as a resource is busy; any work at all shows."""
    if value <= 0:
        return _SHADES[0]
    return _SHADES[min(len(_SHADES) - 1, max(1, round(value * (len(_SHADES) - 1))))]


def _binding(prediction: Prediction) -> str:
    sentences = []
    for sweep in ("forward", "backward"):
        name = prediction.binding(sweep)
        share = min(1.0, prediction.busy[sweep][name])
        sentences.append(f"{sweep} sweep: {name} ({share:.0%} of the time)")
    return "What binds the " + ", the ".join(sentences) + "."


def _traffic(prediction: Prediction) -> Table:
    costs, flash = prediction.costs, prediction.flash
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("traffic of one step")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("rate", justify="right", no_wrap=True)
    rows = [
        ("weights to each engine", costs.stream_bytes),
        ("gradients to the store", costs.gradient_bytes),
    ]
    if flash is not None:
        rows += [("read from flash", flash.read_bytes)]
        rows += [("written to flash", flash.written_bytes)]
    for name, size in rows:
        table.add_row(name, show_bytes(size), show_rate(size / prediction.step_seconds))
    return table


def _width_of_link(prediction: Prediction) -> Iterator[Text]:
    """Yield how wide the link's values are, if those of the program's type are not as wide."""
    link = prediction.machine.link
    if link is None or link.value_bytes is None:
        return
    widths = {weight.stream_dtype.itemsize for weight in prediction.plan.program.weights.values()}
    if widths != {link.value_bytes}:
        yield Text(
            f"The link of {prediction.machine.name} takes {link.value_bytes} bytes for a value of "
            "any type."
        )


def _decisions(prediction: Prediction) -> str:
    plan = prediction.plan
    again = len(plan.plan.recompute)
    stages = len(plan.program.stages)
    repeated = (
        f"the forward of {again} of {stages} stages is computed again"
        if again
        else ("no stage is computed again")
    )
    return (
        f"As training decides: {plan.micro_batches} micro-batches of {plan.micro_batch} x "
        f"{plan.sequence_length}; {stages} stages; {repeated}.{_after_a_loss(prediction)}"
        f"{_relays(prediction)}"
    )


def _relays(prediction: Prediction) -> str:
    """Return how many relays there are; nothing without any."""
    if not prediction.relays:
        return ""
    return (
        f" {prediction.relays:,} relays (fabric.relays) forward weights and add gradients, so that "
        "an engine's link carries its own only."
    )


def _after_a_loss(prediction: Prediction) -> str:
    """Return what happens if engines are lost; nothing if they end with the run."""
    engines, least = prediction.config.engines, prediction.plan.least_engines
    if engines == 1 or prediction.config.cluster.start == "none":
        return ""
    if least == engines:
        return " If an engine is lost, a step waits until it has been replaced."
    return f" If engines are lost, {least:,} or more of {engines:,} go on."


def _price(prediction: Prediction) -> str:
    found = []
    price, seconds = prediction.price, prediction.run_seconds
    dollars, energy = price.dollars(seconds), price.kilowatt_hours(seconds)
    if dollars is not None and price.dollars_per_hour is not None:
        rate = show_dollars(price.dollars_per_hour)
        found.append(f"costs {show_dollars(dollars)} US dollars at {rate} per hour")
    if energy is not None:
        found.append(f"takes {show_energy(energy)}")
    return f"The run {' and '.join(found)}." if found else ""


def _advice(prediction: Prediction, advice: Sequence[Advice]) -> str:
    lines = [f"- {item.text}: {item.gain:.2f}x" for item in advice]
    unbound = least_dram_that_unbinds_flash(prediction)
    if unbound is not None:
        lines.append(f"- flash costs less than 5 % from store.dram: {-(-unbound >> 20)}MiB on")
    if not lines:
        changes = ", ".join(tried_changes(prediction))
        return f"Of the changes that fit, none makes it more than 3 % faster: {changes}."
    return "What would make it faster (tokens per second):\n" + "\n".join(lines)


def as_json(prediction: Prediction, advice: Sequence[Advice]) -> dict[str, Any]:
    """Return the prediction in numbers: seconds, bytes, FLOP, US dollars, watts."""
    plan, flash, costs = prediction.plan, prediction.flash, prediction.costs
    interval, total = prediction.step_interval, prediction.run_interval
    return {
        "machine": prediction.machine.name,
        "model": plan.program.name,
        "parameters": plan.program.parameters,
        "trainable_parameters": plan.program.trainable_parameters,
        "engines": prediction.config.engines,
        "relays": prediction.relays,
        "batch_size": prediction.config.batch.size,
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "sequence_length": plan.sequence_length,
        "sequence_length_note": prediction.length_note,
        "recomputed_stages": len(plan.plan.recompute),
        "least_engines": plan.least_engines,
        "memory_bytes": dict(plan.memory),
        "memory_limit_bytes": plan.memory_limit,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "engine_bytes": plan.shares.engine_peak,
        "shard_bytes": prediction.shard_bytes,
        "step_seconds": prediction.step_seconds,
        "step_seconds_interval": None if interval is None else list(interval),
        "dense_step_seconds": prediction.dense_step_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "run_seconds": prediction.run_seconds,
        "run_seconds_interval": None if total is None else list(total),
        "accuracy_note": prediction.accuracy_note,
        "step_flops": prediction.flops,
        "stream_bytes": costs.stream_bytes,
        "gradient_bytes": costs.gradient_bytes,
        "flash_read_bytes": None if flash is None else flash.read_bytes,
        "flash_written_bytes": None if flash is None else flash.written_bytes,
        "flash_bytes": None if flash is None else flash.flash_bytes,
        "full_disk_note": prediction.full_disk_note,
        "busy": prediction.busy,
        "binding": {sweep: prediction.binding(sweep) for sweep in prediction.busy},
        "cost_per_hour": prediction.price.dollars_per_hour,
        "watts": prediction.price.watts,
        "advice": [{"text": item.text, "gain": item.gain} for item in advice],
    }
