"""What a label means, wherever one is made, counted or summed over."""

IGNORED_LABEL = -100
"""The label of a token whose prediction counts for nothing; PyTorch's own number for it."""
