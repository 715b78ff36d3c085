"""A conventional cluster of GPUs as data: nodes of GPUs joined by a fast link, and a network.

Every rate is a published peak and the share of it that programs attain, so that a file shows which
of its figures is an assumption.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from penstock.config import ByteSize, Origin, Section, explain, read, refuse, setting
from penstock.errors import ConfigError, did_you_mean
from penstock.machines.bounds import LONGEST_SECONDS, SLOWEST_RATE, SMALLEST_EFFICIENCY

_LIBRARY = Path(__file__).parent / "gpu_clusters"

ValueType = Literal["float32", "bfloat16"]
"""Type of the values of products; `bfloat16` stands for both 16-bit types."""


class PeakRate(Section):
    """A peak rate, and the share of it that programs attain."""

    peak: float = setting(..., "peak that the maker publishes, per second", ge=SLOWEST_RATE)
    efficiency: float = setting(
        ..., "share of the peak that programs attain", ge=SMALLEST_EFFICIENCY, le=1
    )

    @property
    def attained(self) -> float:
        """The rate that programs attain."""
        return self.peak * self.efficiency


class ProductRate(PeakRate):
    """The speed of large matrix products of one type, in FLOP/s."""

    dtype: ValueType = setting(..., "type of the values")


class GpuPart(Section):
    """One GPU."""

    memory: ByteSize = setting(..., "its memory", example="80GiB")
    reserved: ByteSize = setting(
        ByteSize.parse("4GiB"), "memory that the driver, the libraries and fragmentation take"
    )
    memory_rate: PeakRate = setting(..., "bytes per second of its memory")
    products: tuple[ProductRate, ...] = Field(
        strict=False, min_length=1, description="speed of matrix products by type"
    )
    watts: float | None = setting(None, "power of a GPU with its share of the node", unit="W", ge=0)
    price: float | None = setting(None, "price of one GPU", unit="USD/hour", ge=0)

    @property
    def product_flops(self) -> dict[str, float]:
        """The FLOP/s that large products attain, by type."""
        return {rate.dtype: rate.attained for rate in self.products}

    @model_validator(mode="after")
    def _check(self) -> GpuPart:
        types = [rate.dtype for rate in self.products]
        if len(set(types)) < len(types):
            raise refuse("products", f"expected each type once, got {', '.join(types)}")
        if self.reserved >= self.memory:
            raise refuse(
                "reserved", f"expected less than memory ({self.memory}), got {self.reserved}"
            )
        return self


class NodePart(Section):
    """One node: its GPUs, and the link between each two of them (NVLink)."""

    gpus: int = setting(..., "GPUs of a node", ge=1)
    link: PeakRate = setting(..., "bytes per second of one GPU to the others, in each direction")
    seconds: float = setting(
        0.0, "time of a message besides its bytes", unit="s", ge=0, le=LONGEST_SECONDS
    )


class NetworkPart(Section):
    """The network between nodes; each GPU has its own share of the node's adapters."""

    link: PeakRate = setting(..., "bytes per second of one GPU's share, in each direction")
    seconds: float = setting(
        0.0, "time of a message besides its bytes", unit="s", ge=0, le=LONGEST_SECONDS
    )


class GpuCluster(Section):
    """A cluster of equal nodes of GPUs."""

    name: str = setting(..., "short name")
    title: str = setting("", "one line about the cluster")
    most: int | None = setting(None, "GPUs that the cluster can have; null: any number", ge=1)
    gpu: GpuPart = setting(..., "one GPU")
    node: NodePart = setting(..., "one node")
    network: NetworkPart = setting(..., "the network between nodes")
    sources: dict[str, str] = Field(
        default_factory=dict, description="where the figures come from, by key"
    )


def known_gpu_clusters() -> tuple[str, ...]:
    """Return the names of the clusters of the library."""
    return tuple(sorted(path.stem for path in _LIBRARY.glob("*.yaml")))


def load_gpu_cluster(name_or_path: str | Path) -> GpuCluster:
    """Return a cluster of the library by its name, or the one that a YAML file describes.

    Raises:
        ConfigError: no such name or file; or, with one line per problem, an invalid file.
    """
    text = str(name_or_path)
    known = known_gpu_clusters()
    path = _LIBRARY / f"{text}.yaml" if text in known else Path(text)
    if not path.exists():
        raise ConfigError(
            f"{text}: expected a known GPU cluster or the path of a YAML file, got "
            f"neither{did_you_mean(text, known)}; known are {', '.join(known)}"
        )
    data, lines = read(path)
    try:
        return GpuCluster.model_validate(data)
    except ValidationError as error:
        origin = Origin(name=str(path), lines=lines)
        raise ConfigError(explain(error, GpuCluster, origin)) from None
