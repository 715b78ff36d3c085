"""The settings of a compilation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.compiler.capture import Precision
from penstock.compiler.decoding import Decoding
from penstock.compiler.product_libraries import Products


@dataclass(frozen=True)
class CompileOptions:
    """The settings of a compilation.

    `train`, `freeze` and `adapters` select the trained weights (`selection.py`). `bfloat16` names
    frozen weights that the store keeps and streams as bfloat16 in every precision. `sparse` maps
    the names of sparse weights to the most entries that their masks may keep. `device` is the
    engine's device, and `products` the library for its matrix products (`product_libraries.py`).
    `slot_bytes` limits the weights of one stage. `weight_prefix` is removed from the parameters'
    names (it belongs to the wrapper that adds the loss). `training` programs return a scalar loss;
    other programs only run forward. `decoding` makes one of the programs of incremental decoding
    (`decoding.py`).
    """

    precision: Precision = "fp32"
    device: str = "cpu"
    products: Products = "torch"
    train: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    adapters: frozenset[str] = frozenset()
    bfloat16: frozenset[str] = frozenset()
    sparse: Mapping[str, int] = field(default_factory=dict, hash=False)
    slot_bytes: int | None = None
    weight_prefix: str = ""
    training: bool = True
    decoding: Decoding | None = None


DEFAULTS = CompileOptions()
