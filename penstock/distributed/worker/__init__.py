"""The worker's side of a distributed run: one engine or one shard of the store."""
