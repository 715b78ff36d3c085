"""Sparse weights in `penstock inspect`: a line for equal weights of all layers."""

from penstock.cli.inspected_weights import sparse_lines


def test_weights_of_all_layers_share_a_line_if_their_shapes_are_equal():
    shapes = {f"h.{layer}.{name}.weight": (10, 20) for name in "ab" for layer in range(48)}
    shapes |= {"h.7.c.weight": (30,), "h.8.b2.weight": (10, 20), "h.99.a.weight": (20, 10)}
    kept = dict.fromkeys(shapes, 20)
    kept["h.47.a.weight"] = 30
    assert sparse_lines(shapes, kept) == [
        "sparse       99 weights: sparsity 89.86%, 1,990 of 19,630 entries",
        "             h.*.a.weight [10 x 20], 48 weights: sparsity 85.00% to 90.00%, 970 of 9,600 "
        "entries",
        "             h.*.b.weight [10 x 20], 48 weights: sparsity 90.00%, 960 of 9,600 entries",
        "             h.7.c.weight [30]: sparsity 33.33%, 20 of 30 entries",
        "             h.8.b2.weight [10 x 20]: sparsity 90.00%, 20 of 200 entries",
        "             h.99.a.weight [20 x 10]: sparsity 90.00%, 20 of 200 entries",
    ]
    assert sparse_lines({}, {}) == []
