"""Predictions of a run before it starts: time, memory, traffic and cost, on any machine."""
