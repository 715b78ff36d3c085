"""The figures of a machine as texts, by the keys that `sources` uses."""

from collections.abc import Iterator, Sequence

from penstock.config import ByteSize, Section
from penstock.machines.description import MachineDescription
from penstock.machines.rates import IN_FLOPS, RateCurve

_NO_FIGURES = {"is_host", "rates", "flash"}
_ONLY_MEASURED = {"float32_in_step", "bfloat16_in_step", "at_once"}  # no data sheet gives them
_UNITS = {
    "operator_seconds": "s",
    "stage_seconds": "s",
    "seconds": "s",
    "watts": "W",
    "price": "USD/hour",
    "both": "B/s",
    "weights": "B/s",
    "gradients": "B/s",
    "store": "B/s",
    "peers": "B/s",
}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_DECIMAL = ((10**12, "TB"), (10**9, "GB"))


def figures(machine: MachineDescription) -> dict[str, str]:
    """Return every figure of a machine that is not null, as a text with its unit."""
    return {key: text for key, text in _all_figures(machine) if text}


def figure_keys(machine: MachineDescription) -> list[str]:
    """Return the keys of all figures that the machine has or could have, its curves included."""
    return [key for key, _ in _all_figures(machine)]


def _all_figures(machine: MachineDescription) -> Iterator[tuple[str, str]]:
    yield from _of_part("engine", machine.engine)
    yield from _of_curves("engine.rates", machine.engine.rates)
    yield from _of_part("store", machine.store)
    yield from _of_curves("store.rates", machine.store.rates)
    if machine.store.flash is not None:
        yield from _of_part("store.flash", machine.store.flash)
        yield from _of_curves("store.flash.rates", machine.store.flash.rates)
    if machine.link is not None:
        yield from _of_part("link", machine.link)
    if machine.processes is not None:
        yield from _of_part("processes", machine.processes)
        yield from _of_curves("processes.rates", machine.processes.rates)


def _of_part(name: str, part: Section) -> Iterator[tuple[str, str]]:
    for key in type(part).model_fields:
        if key not in _NO_FIGURES:
            value = getattr(part, key)
            if value is None and key in _ONLY_MEASURED:
                continue
            yield f"{name}.{key}", "" if value is None else _text(value, _UNITS.get(key, ""))


def _of_curves(name: str, curves: Sequence[RateCurve]) -> Iterator[tuple[str, str]]:
    for curve in curves:
        dtype = "" if curve.dtype == "any" else f".{curve.dtype}"
        layout = "" if curve.layout == "any" else f".{curve.layout}"
        unit = "FLOP/s" if curve.work in IN_FLOPS else "B/s"
        points = [_scaled(rate, unit) for rate in curve.rates]
        if len(points) > 1:
            pairs = zip(points, curve.sizes, strict=True)
            points = [f"{rate} at {size:g}" for rate, size in pairs]
        yield f"{name}.{curve.work}{dtype}{layout}", ", ".join(points)


def _text(value: ByteSize | float, unit: str) -> str:
    if isinstance(value, ByteSize):
        for size, name in _DECIMAL:
            if value % size == 0:
                return f"{value // size:,} {name}"
        return str(value)
    if unit == "B/s":
        return _scaled(value, unit)
    number = f"{value:,}" if isinstance(value, int) or value.is_integer() else f"{value:g}"
    return f"{number.removesuffix('.0')} {unit}".rstrip()


def _scaled(rate: float, unit: str) -> str:
    size, prefix = next(pair for pair in _PREFIXES if rate >= pair[0] or pair[0] == 1.0)
    return f"{rate / size:.4g} {prefix}{unit}"
