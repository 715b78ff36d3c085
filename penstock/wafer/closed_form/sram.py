"""Memory of a core that a streamed product takes: activations and sums in flight.

Weights take none of it: an entry is used on arrival, and those in flight wait in the routers'
queues (`queue_words` of 32 bits per colour and direction).
"""

from dataclasses import dataclass

from penstock.errors import BudgetError
from penstock.wafer.closed_form.layout import ActivationLayout
from penstock.wafer.closed_form.streamed_product import HIDDEN, StreamedProduct, StreamingOptions
from penstock.wafer.parameters import CoreParameters


@dataclass(frozen=True)
class SramUse:
    """Bytes of the fullest core.

    Attributes:
        inputs, outputs: activations of the product's two sides; in backward their gradients too.
        sums: partial sums of output features that are not yet sent, and those received.
        reserved: program and runtime.
        capacity: memory of a core.
    """

    inputs: int
    outputs: int
    sums: int
    reserved: int
    capacity: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.inputs + self.outputs + self.sums + self.reserved

    @property
    def fits(self) -> bool:
        """Whether a core has as many."""
        return self.total <= self.capacity


def sram_use(
    product: StreamedProduct,
    layout: ActivationLayout,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    *,
    is_training: bool = True,
    in_place: bool = False,
) -> SramUse:
    """Return the memory that a product takes.

    Args:
        is_training: whether gradients of both sides are there as well, as in backward.
        in_place: whether the outputs' gradients replace the outputs, as in a language-model head.
    """
    tokens = layout.tokens(product.tokens)
    sides = 2 if is_training else 1
    each = tokens * product.element_bytes
    waiting = options.accumulators + min(options.inbox_rows or 1, product.outputs)
    return SramUse(
        inputs=sides * each * layout.features(product.inputs),
        outputs=(1 if in_place else sides) * each * layout.features(product.outputs),
        sums=each * max(waiting, options.broadcast_rows if is_training else 0),
        reserved=core.reserved_bytes,
        capacity=core.sram_bytes,
    )


def most_tokens(
    outputs: int,
    inputs: int,
    layout: ActivationLayout,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    element_bytes: int = 2,
    *,
    in_place: bool = False,
) -> int:
    """Return the most tokens with which a layer of a size fits the cores in training; 0 if none.

    Args:
        in_place: as for `sram_use`.
    """
    one = StreamedProduct(outputs, inputs, tokens=1, element_bytes=element_bytes)
    use = sram_use(one, layout, core, options, in_place=in_place)
    per_core = (use.capacity - use.reserved) // (use.total - use.reserved)
    return per_core * layout.token_columns


def check_fits(
    product: StreamedProduct,
    layout: ActivationLayout,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    *,
    name: str = "layer",
    in_place: bool = False,
) -> SramUse:
    """Return the memory that a product takes in training.

    Args:
        name: of the product, with which the error begins.
        in_place: as for `sram_use`.

    Raises:
        BudgetError: a core has less.
    """
    use = sram_use(product, layout, core, options, in_place=in_place)
    if not use.fits:
        size = product.outputs, product.inputs
        most = most_tokens(*size, layout, core, options, product.element_bytes, in_place=in_place)
        few = f"at most {most} tokens fit; give fewer tokens (a smaller batch.micro) or take"
        remedy = few if most else "take"
        raise BudgetError(
            f"{name}: {product} on {layout.mesh} cores needs {use.total:,} bytes per core "
            f"(activations {use.inputs + use.outputs:,}, sums {use.sums:,}, program "
            f"{use.reserved:,}), a core has {use.capacity:,}; {remedy} a larger mesh"
        )
    return use
