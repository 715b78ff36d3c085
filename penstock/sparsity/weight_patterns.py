"""Which weights of a model are sparse, by name patterns or by the usual default."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from penstock.errors import ConfigError, few
from penstock.name_patterns import matching


def sparse_weights(
    shapes: Mapping[str, tuple[int, ...]],
    patterns: Sequence[str] = (),
    keep_dense: Sequence[str] = (),
    dense_by_default: Collection[str] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """Return the names of the sparse weights, in the order of `shapes`.

    Args:
        shapes: shapes of all weights.
        patterns: name patterns of sparse weights; weights of one dimension (biases, norms) among
            them stay dense. Empty: all weights of two dimensions.
        keep_dense: name patterns of weights that stay dense whatever `patterns` says.
        dense_by_default: names of the embeddings and heads, which the program knows; sparse only if
            `patterns` names them.
        aliases: the further names of tied weights, and the first name of each; patterns match them
            too.

    Raises:
        ConfigError: a pattern matches no weight, `patterns` matches only weights of one dimension,
            or no weight is left.
    """
    names = list(shapes)

    def named_by(key: str, patterns: Sequence[str]) -> set[str]:
        others = [other for other, first in aliases.items() if first in shapes]
        return {aliases.get(name, name) for name in matching(key, patterns, [*names, *others])}

    if patterns:
        named = named_by("sparsity.weights", patterns)
        chosen = {name for name in named if len(shapes[name]) > 1}
        if not chosen:
            raise ConfigError(
                f"sparsity.weights: expected patterns of weights of two dimensions or more, "
                f"{', '.join(map(repr, patterns))} match only {few(sorted(named))}; name the "
                "weights of the products, such as '*.mlp.*.weight'"
            )
    else:
        chosen = {name for name, shape in shapes.items() if len(shape) == 2}
        chosen -= set(dense_by_default)
    if keep_dense:
        chosen -= named_by("sparsity.keep_dense", keep_dense)
    if not chosen:
        raise ConfigError(
            "sparsity: expected at least one sparse weight, got none of "
            f"{few(names)}; name them in sparsity.weights, or shorten sparsity.keep_dense"
        )
    return tuple(name for name in names if name in chosen)
