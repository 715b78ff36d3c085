"""Selection of the trained weights: those that `train` names, without those that `freeze` names.

Patterns are matched against every name of a tied weight; a match of one name applies to the weight.
"""

from collections.abc import Collection, Mapping, Sequence

from penstock.errors import ConfigError
from penstock.name_patterns import matching


def select_trainable(
    aliases: Mapping[str, Sequence[str]],
    differentiable: Collection[str],
    *,
    train: Sequence[str] = (),
    freeze: Sequence[str] = (),
    adapters: Collection[str] = (),
) -> frozenset[str]:
    """Return the names of the weights that get a gradient and optimizer state.

    **Arguments:** `aliases` maps every weight to its further names; `differentiable` are the
    weights whose `requires_grad` the model has set; `train` and `freeze` are patterns. Without
    `train`, all weights are trained, or only `adapters` if there are any. With `train`, the
    matching weights and the adapters are trained. Weights that match `freeze` are never trained.

    **Raises:** `ConfigError` for a pattern that matches nothing, and for a pattern of `train` none
    of whose weights would be trained.
    """
    names = [name for first, others in aliases.items() for name in (first, *others)]
    frozen = matching("freeze", freeze, names)

    def weights(found: Collection[str]) -> set[str]:
        return {first for first, others in aliases.items() if {first, *others} & set(found)}

    may = weights(differentiable)
    stay = weights(frozen)
    chosen = set(adapters) if train or adapters else set(aliases)
    for pattern in train:
        here = weights(matching("train", [pattern], names))
        if not here & may:
            raise ConfigError(
                f"train: pattern {pattern!r} matches only weights that the model itself keeps "
                "fixed (requires_grad is False); set it to True there, or remove the pattern"
            )
        if not (here & may) - stay:
            raise ConfigError(
                f"train: pattern {pattern!r} matches only weights that freeze matches too, and "
                "freeze has precedence; remove them from one of the two"
            )
        chosen |= here
    return frozenset((chosen & may) - stay)
