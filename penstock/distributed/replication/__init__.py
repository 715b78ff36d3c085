"""Replicas of the store's shards: assignment, loss and rebuild."""
