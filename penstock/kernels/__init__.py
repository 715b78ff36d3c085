"""The hot loops: compiled on first use, in parallel, the same to the bit on any number of threads.

Arrays are flat NumPy arrays; bfloat16 travels as its uint16 patterns. The public names are the
modules below, each imported on its own, since most of them load a compiler.
"""

__all__ = [
    "adamw",
    "cross_entropy",
    "exact_sum",
    "gradients",
    "lion",
    "memory",
    "moments",
    "philox",
    "processor",
    "sgd",
    "split_master",
]
