"""A training run from start to end, and what is done with its weights afterwards."""
