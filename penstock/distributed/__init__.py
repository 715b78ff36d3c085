"""Runs in several processes: protocol, transport, and the sides of trainer and worker."""
