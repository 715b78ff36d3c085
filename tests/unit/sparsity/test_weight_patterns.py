"""Which weights are sparse, and what is refused."""

import pytest

from penstock.errors import ConfigError
from penstock.sparsity import sparse_weights

SHAPES = {
    "wte.weight": (1000, 64),
    "h.0.ln.weight": (64,),
    "h.0.mlp.up.weight": (256, 64),
    "h.0.mlp.up.bias": (256,),
    "h.0.conv.weight": (8, 8, 3, 3),
    "h.0.attn.weight": (64, 192),
    "head.weight": (1000, 64),
}
KEPT_DENSE = {"wte.weight", "head.weight"}


@pytest.mark.parametrize(
    ("patterns", "keep_dense", "expected"),
    [
        ((), (), ("h.0.mlp.up.weight", "h.0.attn.weight")),
        ((), ("*.attn.*",), ("h.0.mlp.up.weight",)),
        (("*.mlp.*",), (), ("h.0.mlp.up.weight",)),
        (("*.conv.*", "head.*"), (), ("h.0.conv.weight", "head.weight")),
    ],
)
def test_the_default_and_patterns(patterns, keep_dense, expected):
    assert sparse_weights(SHAPES, patterns, keep_dense, KEPT_DENSE) == expected


def test_patterns_match_the_further_names_of_tied_weights():
    aliases = {"lm_head.weight": "wte.weight", "h.0.mlp.twin.weight": "h.0.mlp.up.weight"}

    def chosen(patterns, keep_dense=()):
        return sparse_weights(SHAPES, patterns, keep_dense, KEPT_DENSE, aliases)

    assert chosen(["lm_head.*"]) == ("wte.weight",)
    assert chosen(["wte.*", "h.0.attn.*"]) == ("wte.weight", "h.0.attn.weight")
    assert chosen([], ["*.twin.*"]) == ("h.0.attn.weight",)


@pytest.mark.parametrize(
    ("patterns", "keep_dense", "message"),
    [
        (
            ("*.mpl.*",),
            (),
            "sparsity.weights: pattern '*.mpl.*' matches no weight; the model's weights are named "
            "like wte.weight, h.0.ln.weight, h.0.mlp.up.weight, h.0.mlp.up.bias, h.0.conv.weight "
            "and 2 more",
        ),
        (
            ("*.ln.*",),
            (),
            "sparsity.weights: expected patterns of weights of two dimensions or more, '*.ln.*' "
            "match only h.0.ln.weight; name the weights of the products, such as '*.mlp.*.weight'",
        ),
        (
            (),
            ("h.*",),
            "sparsity: expected at least one sparse weight, got none of wte.weight, "
            "h.0.ln.weight, h.0.mlp.up.weight, h.0.mlp.up.bias, h.0.conv.weight and 2 more; name "
            "them in sparsity.weights, or shorten sparsity.keep_dense",
        ),
    ],
)
def test_patterns_that_leave_nothing_are_refused(patterns, keep_dense, message):
    with pytest.raises(ConfigError) as raised:
        sparse_weights(SHAPES, patterns, keep_dense, KEPT_DENSE)
    assert str(raised.value) == message
