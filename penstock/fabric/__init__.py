"""The step protocol and what carries its messages."""
