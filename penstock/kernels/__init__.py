"""The hot loops: compiled at first use, parallel, bit-identical for any number of threads.

Arrays are flat NumPy arrays; bfloat16 is represented by its uint16 patterns. The public names are
the modules below. Each is imported separately, since most of them load a compiler.
"""

__all__ = [
    "adamw",
    "cross_entropy",
    "exact_sum",
    "gap_codes",
    "gradients",
    "lion",
    "memory",
    "mesh_simulation",
    "mesh_tables",
    "moments",
    "packed_entries",
    "packed_moments",
    "philox",
    "position_keys",
    "processor",
    "sgd",
    "sparse_expansion",
    "sparse_layout",
    "sparse_panels",
    "sparse_products",
    "sparse_vector_product",
    "split_master",
    "token_attention",
    "transposed_copy",
    "vector_products",
]
