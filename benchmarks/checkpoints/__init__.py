"""Hugging Face checkpoints of random weights that benchmarks import."""

from checkpoints.llama import SEED, VOCABULARY, Size, hash_of, make_llama, widen

__all__ = ["SEED", "VOCABULARY", "Size", "hash_of", "make_llama", "widen"]
