"""The memory of a store in memory, before anything is allocated."""

from collections import Counter

from penstock.store.holding import Holding
from penstock.store.mask_rule import MaskRule, mask_memory
from penstock.store.optimizers import Optimizer
from penstock.store.packed import room_of
from penstock.store.roles import AGE, Role


def dram_store_memory(
    program: Holding, optimizer: Optimizer, gradient_width: int, masks: MaskRule | None = None
) -> dict[str, int]:
    """Return `DramStore.memory_bytes`, up to the padding of weights to cache lines.

    Args:
        program: names the weights.
        optimizer: says which state a trained weight has.
        gradient_width: bytes per number of a gradient; a weight that several stages use takes 4.
        masks: the rule of masks, if weights are sparse.
    """
    account: dict[str, int] = {}

    def add(use: str, size: int) -> None:
        account[use] = account.get(use, 0) + size

    uses = Counter(name for stage in program.stages for name in stage.weights)
    age = None if masks is None else masks.age_type(optimizer.corrected_betas)
    for name, spec in program.weights.items():
        for part in spec.format.parts:
            add(part.name, room_of(spec) * part.width)
        if not spec.trainable:
            continue
        add("gradient", room_of(spec) * (gradient_width if uses[name] == 1 else 4))
        for role in optimizer.roles:
            add(role.name, room_of(spec, role.group) * role.numpy.itemsize)
        if age is not None and spec.is_sparse:
            add(AGE, Role(AGE, age.__name__).bytes(room_of(spec)))
    return account | mask_memory(program, masks)
