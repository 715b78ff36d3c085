"""The price and the energy of a run, from prices and power of a described machine."""

from dataclasses import dataclass

from penstock.machines import GpuCluster, MachineDescription

_SECONDS = 3600  # per hour


@dataclass(frozen=True)
class RunPrice:
    """What a machine costs and draws while it trains.

    Attributes:
        dollars_per_hour: of all devices and the store, in US dollars; None if it is not known.
        watts: power of all devices and the store; None if it is not known.
    """

    dollars_per_hour: float | None
    watts: float | None

    def dollars(self, seconds: float) -> float | None:
        """Return the price of a run of this length in US dollars."""
        rate = self.dollars_per_hour
        return None if rate is None else rate * seconds / _SECONDS

    def kilowatt_hours(self, seconds: float) -> float | None:
        """Return the energy of a run of this length."""
        return None if self.watts is None else self.watts / 1000 * seconds / _SECONDS


def price_of_engines(machine: MachineDescription, engines: int) -> RunPrice:
    """Return the price of a run with a store and this number of engines."""
    engine, store = machine.engine, machine.store
    return RunPrice(
        _total(engine.price, engines, store.price), _total(engine.watts, engines, store.watts)
    )


def price_of_gpus(cluster: GpuCluster, gpus: int) -> RunPrice:
    """Return the price of a run with this number of GPUs."""
    return RunPrice(_total(cluster.gpu.price, gpus, None), _total(cluster.gpu.watts, gpus, None))


def _total(device: float | None, devices: int, store: float | None) -> float | None:
    """Return the sum of what is known; None if nothing is."""
    if device is None and store is None:
        return None
    return (device or 0.0) * devices + (store or 0.0)
