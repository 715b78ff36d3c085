"""The trainer's side of a distributed run: members, workers, statistics."""
